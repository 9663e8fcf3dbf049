"""FSDP2's units from the vision entry points."""

from __future__ import annotations

import pytest
import torch

from snnpart import vision
from snnpart.errors import ConfigError
from snnpart.vision.session import compile_options


@pytest.mark.parametrize(("said", "meant"), [("auto", "auto"), ("yes", True), ("no", False)])
def test_units_are_handed_on(said: str, meant: object) -> None:
    config = vision.TrainingConfig(model="tests.nets:Net", dp="fsdp2", fsdp_units=3, fsdp_reshard=said)  # type: ignore[arg-type]
    options = compile_options(config, torch.zeros(1, 8, 8))
    assert (options["dp"], options["fsdp_units"], options["fsdp_reshard"]) == ("fsdp2", 3, meant)


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="fsdp_units"):
        vision.TrainingConfig(model="tests.nets:Net", fsdp_units=0)
    with pytest.raises(ConfigError, match="fsdp_reshard"):
        vision.TrainingConfig(model="tests.nets:Net", fsdp_reshard="always")  # type: ignore[arg-type]
