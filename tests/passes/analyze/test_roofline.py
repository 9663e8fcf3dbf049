"""The roofline of a step: what each task of an operation needs, counted by hand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from snnpart.api import parallelize
from snnpart.costs import MachineProfile
from snnpart.passes.analyze.roofline import roofline
from snnpart.program import CompiledProgram
from snnpart.roofline import Work, total

T, N, C, SIDE = 2, 3, 8, 6
MACHINE = MachineProfile(name="toy", flops={"float32": 1e9, "bfloat16": 4e9}, copy=1e9, launch_us=3.0)


class Net(nn.Module):
    """Two convolutions with a norm and a neuron each, the first's spikes added to the second's; pool and head."""

    def __init__(self) -> None:
        super().__init__()
        neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
        self.conv1, self.conv2 = nn.Conv2d(3, C, 3, padding=1, bias=False), nn.Conv2d(C, C, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(C), nn.BatchNorm2d(C)
        self.sn1, self.sn2 = (neuron.LIFNode(detach_reset=True, step_mode="m") for _ in range(2))
        self.head = nn.Linear(C, 5)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[:2]
        first = self.sn1(self.norm1(self.conv1(x.flatten(0, 1))).unflatten(0, steps))
        second = self.sn2(self.norm2(self.conv2(first.flatten(0, 1))).unflatten(0, steps)) + first
        out: Tensor = self.head(F.max_pool2d(second.flatten(0, 1), SIDE).flatten(1)).unflatten(0, steps).mean(0)
        return out


def compiled(batch: int = N, **options: Any) -> CompiledProgram:
    x = torch.rand(T, batch, 3, SIDE, SIDE)
    options = {"fuse": True, "channels_last": True, **options}
    return parallelize(Net(), example_inputs=x, input_layout="TNCHW", verify="off", **options).compiled


def sums(works: tuple[Work, ...]) -> dict[str, tuple[float, float]]:
    """flops and bytes of each task."""
    found: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for work in works:
        found[work.task] = (found[work.task][0] + work.flops, found[work.task][1] + work.moved)
    return dict(found)


ELEMENTS = T * N * C * SIDE**2
IMAGES = T * N * 3 * SIDE**2
W1, W2, HEAD, NORMS = C * 3 * 9, C * C * 9, C * 5, 4 * C


def by_hand(low: int) -> dict[str, tuple[float, float]]:
    """flops and bytes of each task of `Net`, activations of `low` bytes."""
    flops1, flops2, flops3 = 2 * ELEMENTS * 27, 2 * ELEMENTS * 9 * C, 2 * T * N * C * 5
    ins, outs = T * N * C, T * N * 5
    tasks: dict[str, tuple[float, float]] = {
        "convolution": (flops1 + flops2, low * (IMAGES + W1 + W2 + 3 * ELEMENTS)),
        "convolution dgrad": (flops2, low * (2 * ELEMENTS + W2)),
        "convolution wgrad": (flops1 + flops2, low * (IMAGES + 3 * ELEMENTS) + 4 * (W1 + W2)),
        "product": (flops3, low * (ins + HEAD + outs)),
        "product gradients": (2 * flops3, low * (2 * outs + HEAD + 2 * ins) + 4 * HEAD),
        "neuron": (0, low * 5 * ELEMENTS),
        "neuron backward": (0, low * 6 * ELEMENTS),
        "pool": (0, low * (ELEMENTS + ins)),
        "pool backward": (0, low * (ELEMENTS + ins)),
        "rest": (0, low * (outs + N * 5)),
        "rest backward": (0, low * (outs + N * 5)),
        "optimizer": (0, 7 * 4 * (W1 + W2 + HEAD + 5 + NORMS)),
    }
    return tasks if low == 4 else {**tasks, "weight casts": (0, 6 * (W1 + W2 + HEAD + 5))}


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_flops_and_bytes_are_those_counted_by_hand(low: torch.dtype | None) -> None:
    works = roofline(compiled(), MACHINE, N, low=low)
    wanted = by_hand(4 if low is None else 2)
    assert sums(works) == {task: pytest.approx(pair) for task, pair in wanted.items()}
    rate = 1e9 if low is None else 4e9
    heavy = next(work for work in works if work.task == "convolution dgrad")
    assert heavy.us == pytest.approx(1e6 * max(heavy.flops / rate, heavy.moved / 1e9)) and heavy.module == "conv2"


def test_flops_are_those_that_torch_counts() -> None:
    with FlopCounterMode(display=False) as counter:
        Net()(torch.rand(T, N, 3, SIDE, SIDE)).sum().backward()
    assert sum(work.flops for work in roofline(compiled(), MACHINE, N)) == counter.get_total_flops()


def test_a_norm_on_its_own_is_counted_apart_from_its_neuron() -> None:
    apart = sums(roofline(compiled(fuse=False), MACHINE, N))
    assert apart["norm"][1] == pytest.approx(4 * 2 * 2 * ELEMENTS)
    assert apart["norm backward"][1] == pytest.approx(4 * 2 * 3 * ELEMENTS)
    assert apart["neuron backward"][1] == pytest.approx(4 * 2 * 3 * ELEMENTS)


def test_a_step_of_a_larger_batch_is_that_of_a_network_compiled_for_it() -> None:
    small, large = (roofline(compiled(batch), MACHINE, 12, low=torch.bfloat16) for batch in (N, 12))
    assert small == large
    assert total(small) > total(roofline(compiled(), MACHINE, N, low=torch.bfloat16))


def test_ranks_share_what_there_is() -> None:
    """Stages divide the work; ranks of a tp group divide products, and each runs what is replicated."""
    one = sums(roofline(compiled(), MACHINE, N))
    stages = compiled(pp=2, microbatches=1)
    halves = [sums(roofline(stages, MACHINE, N, rank=(pp, 0))) for pp in (0, 1)]
    for task, (flops, moved) in one.items():
        assert sum(half.get(task, (0, 0))[0] for half in halves) == pytest.approx(flops), task
        assert sum(half.get(task, (0, 0))[1] for half in halves) == pytest.approx(moved), task
    two = compiled(tp=2)
    shared = [sums(roofline(two, MACHINE, N, rank=(0, tp))) for tp in (0, 1)]
    assert sum(part["convolution"][0] for part in shared) == pytest.approx(one["convolution"][0])
    shards = sums(roofline(compiled(), MACHINE, N, shards=4))
    assert shards["optimizer"][1] == pytest.approx(one["optimizer"][1] / 4)
