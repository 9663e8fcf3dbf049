"""What the vision entry points hand to the compiler: FSDP2's units, and a plan's kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from snnpart import parallelize, vision
from snnpart.errors import ConfigError
from snnpart.plan import Plan
from snnpart.vision.session import compile_options
from tests.vision.nets import Digits


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


def test_a_given_plan_says_what_is_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snnpart.vision.session.on_gpu", lambda config: True)
    given, found = tmp_path / "plan.json", {}
    given.write_text(Plan().to_json())
    for plan in (None, given):
        options = compile_options(vision.TrainingConfig(model="tests.nets:Net", plan=plan), torch.zeros(1, 8, 8))
        found[plan is None] = (options["fuse"], options["channels_last"])
    assert found == {True: (True, "auto"), False: (None, None)}


def test_a_given_plan_says_the_schedule(tmp_path: Path) -> None:
    """The default used to ask for 1f1b beside it, and was refused."""
    given = tmp_path / "plan.json"
    given.write_text(Plan(pp=2, schedule="gpipe", microbatches=2).to_json())
    for asked, taken in ({}, "gpipe"), ({"schedule": "gpipe"}, "gpipe"), ({"schedule": "1f1b"}, None):
        config = vision.TrainingConfig(model="tests.vision.nets:Digits", plan=given, **asked)  # type: ignore[arg-type]
        options = compile_options(config, torch.zeros(1, 8, 8))
        if taken is None:
            with pytest.raises(ConfigError, match="schedule='1f1b', but the plan says 'gpipe'"):
                parallelize(Digits(width=4), **options)
        else:
            assert parallelize(Digits(width=4), **options).plan.schedule == taken
