"""Loops over time: which reads of single places of a tensor are frames of its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart.ops_time import Loop
from snnpart.passes.analyze import loops
from snnpart.passes.analyze.kinds import name_of, tensor_inputs
from tests.graphs import Wrap
from tests.passes.rewrite.fold_time.nets import spike
from tests.passes.rewrite.fold_time.parity import active, check, images, repeated, traced


def neurons(m: Any, currents: list[Tensor]) -> Tensor:
    v: Any = 0.0
    out = []
    for current in currents:
        v = 0.5 * v + current
        s = spike(v - 0.4)
        v = v * (1 - s.detach())
        out.append(m.out(s))
    return torch.stack(out)


def halves(m: Any, x: Tensor) -> Tensor:
    """The two rows of the input make one current, of which the gain goes two ways; every step reads it."""
    base, gain = x[:, 0], x[:, 1]
    current = base * (gain.exp() + gain)
    return neurons(m, [m.fc(current) for _ in range(m.steps)])


def frames(m: Any, x: Tensor) -> Tensor:
    """A layer reads at each step its frame of what another made of all."""
    seen = m.all(x)
    return neurons(m, [m.fc(seen[:, t]) for t in range(m.steps)])


def network(body: Any, steps: int) -> nn.Module:
    torch.manual_seed(0)
    return active(Wrap(body, steps=steps, all=nn.Linear(6, 6), fc=nn.Linear(6, 5), out=nn.Linear(5, 3)))


def reads(found: loops.Loop) -> int:
    """The groups of reads among those of the steps."""
    return sum(name_of(nodes[0]) in ("getitem", "select") for nodes in found.groups)


@pytest.mark.parametrize("steps", [2, 3])
def test_rows_that_belong_to_no_step_are_no_frames(steps: int) -> None:
    """Of two steps there are as many as rows; of three, all but one."""
    net, x = network(halves, steps), images(3, 2, 6)
    found = loops.find(traced(net, x))
    assert found.length == steps and len(found.groups) == 3 and reads(found) == 0
    for node, step in found.steps.items():
        assert all(found.steps.get(source, step) <= step for source in tensor_inputs(node)), node
    folded = check(net, x)
    assert not repeated(folded)
    assert sum(isinstance(node.target, Loop) for node in folded.graph.nodes) == 1


@pytest.mark.parametrize("steps", [2, 4])
def test_frames_are_read_at_their_steps(steps: int) -> None:
    net, x = network(frames, steps), images(3, steps, 6)
    found = loops.find(traced(net, x, in_dims=0))
    assert found.length == steps and reads(found) == 1
    assert not repeated(check(net, x, in_dims=0))
