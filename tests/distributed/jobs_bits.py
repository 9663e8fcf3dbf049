"""What the ranks do in the test that counts the bytes of gathers in the process group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from snnpart import compat
from snnpart.api import parallelize
from snnpart.costs import CPU, Link

SLOW = replace(CPU, links={axis: Link(1e6, 1.0) for axis in ("tp", "pp", "dp")})


class Net(nn.Module):
    """Spikes and sums of spikes between linear layers: [N, 6] -> [N, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6 if i == 0 else 8, 8) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        counts = (self.layers[0](x) > 0.1).to(x)
        for layer in self.layers[1:]:
            counts = (layer(counts) > 0.1).to(x) + counts
        return counts


def sent_in_evaluation() -> dict[str, Any]:
    """Bytes that gathers bring to this rank in one evaluation, and what the report says."""
    torch.manual_seed(0)
    module, x = Net().double(), torch.randn(16, 6, dtype=torch.float64)
    program = parallelize(module, tp=2, example_inputs=x, shard={"*": "column"}, profile=SLOW)
    running: Any = program.launch()
    seen: list[int] = []
    original = compat.gather_into

    def count(whole: Tensor, own: Tensor, group: Any) -> Any:
        seen.append(whole.numel() * whole.element_size())
        return original(whole, own, group)

    with patch.object(compat, "gather_into", count):
        outputs = running.eval_step(x)
    rows = [row.forward_bytes for row in program.report().collectives if row.operation == "all_gather"]
    running.close()
    return {"seen": seen, "report": rows, "outputs": outputs, "want": module(x).detach()}
