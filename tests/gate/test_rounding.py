"""The comparison at launch is made in whole float32, and leaves the user's own choice as it was."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, backends, nn

from snnpart import parallelize
from snnpart.gate.rounding import whole_float32

SWITCHES: tuple[Any, ...] = (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)


def exact() -> bool:
    return all(switch.fp32_precision in ("none", "ieee") for switch in SWITCHES)


CHOICES = {
    "torch's own": "pass",
    "products too": "torch.set_float32_matmul_precision('high')",
    "for all": "backends.fp32_precision = 'tf32'",
    "for one operation": "backends.cudnn.conv.fp32_precision = 'ieee'",
}
CHECK = """
import torch
from torch import backends
from tests.gate.test_rounding import exact
from snnpart.gate.rounding import whole_float32

def read(get):
    try:
        return get()
    except RuntimeError:
        return "raises"

def all_reads():
    nodes = backends, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul
    old = lambda: backends.cudnn.allow_tf32, lambda: backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision
    return [node.fp32_precision for node in nodes] + [read(get) for get in old]

{choice}
before = all_reads()
try:
    with whole_float32():
        assert exact()
        raise ValueError
except ValueError:
    pass
assert all_reads() == before, (before, all_reads())
"""


@pytest.mark.parametrize(
    "choice", ["for all", *(pytest.param(c, marks=pytest.mark.all) for c in CHOICES if c != "for all")]
)
def test_afterwards_all_is_as_the_user_has_it(choice: str) -> None:
    """In a process of its own: what torch has by itself cannot be set again."""
    done = subprocess.run([sys.executable, "-c", CHECK.format(choice=CHOICES[choice])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_older_switch_can_be_read_inside() -> None:
    before = backends.cudnn.allow_tf32
    with whole_float32():
        assert backends.cudnn.allow_tf32 is False and backends.cuda.matmul.allow_tf32 is False
    assert backends.cudnn.allow_tf32 is before


def test_a_module_that_sets_cudnns_flags_compiles() -> None:
    class Flags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            with backends.cudnn.flags(enabled=True, deterministic=True):
                return self.conv(x)  # type: ignore[no-any-return]

    parallelize(Flags(), example_inputs=torch.rand(2, 1, 5, 5)).launch().close()
