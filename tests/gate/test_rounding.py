"""The gate compares in whole float32, and leaves the user's own choice as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, backends, nn

from snnpart import gate, parallelize
from snnpart.errors import VerifyError
from snnpart.gate import check, launched
from snnpart.trace import trace

SWITCHES = (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)


def precisions() -> list[str]:
    return [switch.fp32_precision for switch in SWITCHES]


class Noting:
    """Calls a function, and notes the precisions that it is called in."""

    def __init__(self, function: Any) -> None:
        self._function, self.found = function, list[list[str]]()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.found.append(precisions())
        return self._function(*args, **options)


@pytest.fixture
def tf32() -> Any:
    before = precisions()
    for switch in SWITCHES:
        switch.fp32_precision = "tf32"
    yield
    for switch, precision in zip(SWITCHES, before, strict=True):
        switch.fp32_precision = precision


def test_a_trace_is_compared_in_whole_float32(tf32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    noting = Noting(check.observe_module)
    monkeypatch.setattr(check, "observe_module", noting)
    model, x = nn.Linear(3, 2), torch.rand(4, 3)
    gate.check_trace(model, trace(model, x), x)
    assert noting.found == [["ieee"] * 3] and precisions() == ["tf32"] * 3


def test_a_launched_program_is_too(tf32: None, monkeypatch: pytest.MonkeyPatch) -> None:
    noting = Noting(launched._observe_running)
    monkeypatch.setattr(launched, "_observe_running", noting)
    with parallelize(nn.Linear(3, 2), example_inputs=torch.rand(4, 3)).launch():
        assert noting.found == [["ieee"] * 3] and precisions() == ["tf32"] * 3


def test_a_refusal_leaves_the_users_choice(tf32: None) -> None:
    class NaN(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 0 * 0

    model, x = NaN(), torch.rand(4, 3)
    with pytest.raises(VerifyError, match="holds NaN or infinite values"):
        gate.check_trace(model, trace(model, x), x)
    assert precisions() == ["tf32"] * 3
