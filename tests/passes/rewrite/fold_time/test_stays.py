"""Networks that fold-time leaves as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import ops
from snnpart.ops_time import Loop
from tests.graphs import Wrap
from tests.passes.rewrite.fold_time.nets import ArgumentLIF, spike
from tests.passes.rewrite.fold_time.parity import active, check, fold, images, traced
from tools.zoo.unet import RecordedUNet


def names(graph: Any) -> list[str]:
    return [node.name for node in graph.graph.nodes]


def test_a_network_without_a_loop_stays() -> None:
    graph = traced(Wrap(lambda m, x: m.fc(x).relu(), fc=nn.Linear(4, 3)), torch.randn(2, 4))
    before = names(graph)
    assert names(fold(graph)) == before


def test_a_network_in_multi_step_mode_stays() -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    net = nn.Sequential(nn.Linear(4, 4), neuron.LIFNode(step_mode="m"), nn.Linear(4, 4))
    graph = traced(net, torch.randn(3, 2, 4), in_dims=1, time_dims=0)
    assert names(fold(graph)) == names(graph)


class Early(nn.Module):
    """The membrane of the first step has no sign; `read`: it is an output too."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.fc, self.out, self.read = nn.Linear(6, 5), nn.Linear(5, 3), read

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v, record, first = torch.zeros(x.shape[0], 5, dtype=x.dtype), [], x
        for t in range(4):
            v = 0.5 * v + self.fc(x[:, t])
            if t == 0:
                v = first = v.abs()
            s = spike(v - 0.4)
            v = v * (1 - s.detach())
            record.append(self.out(s))
        return torch.stack(record), first.exp() if self.read else v


@pytest.mark.parametrize("read", [False, True])
def test_a_value_of_a_loops_first_step_that_is_read_after_it_is_made_before_the_loop(read: bool) -> None:
    """The first round cannot place it and leaves the neurons; the next one folds them around it."""
    torch.manual_seed(0)
    graph = check(active(Early(read)), images(3, 4, 6))
    folds = [line for line in graph.notes["fold-time"].splitlines() if "operations in one call each" in line]
    assert len(folds) == 1 + read and "stays as it is" not in graph.notes["fold-time"]
    assert sum(isinstance(node.target, Loop) for node in graph.graph.nodes) == 1


def test_what_a_fold_made_of_three_steps_is_no_copy_of_what_it_left_of_one() -> None:
    torch.manual_seed(0)
    net, x = RecordedUNet(True, (3, 4)).double(), images(4, 3, 16, 16)
    net(x)  # its buffers take the shape of what comes
    graph = check(net, x)
    folds = [line for line in graph.notes["fold-time"].splitlines() if "operations in one call each" in line]
    assert folds == ["3 steps: 12 operations in one call each, 0 parts step by step"]
    assert "it does not run alike at step 2" in graph.notes["fold-time"]


def test_a_number_made_of_the_batch_size_that_changes_with_the_step() -> None:
    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            v, steps = torch.zeros(x.shape[0], 5, dtype=x.dtype), []
            for t in range(4):
                v = 0.5 * v + self.fc(x[:, t]) / x[:, : t + 1].numel()
                steps.append(self.out(v))
            return torch.stack(steps)

    torch.manual_seed(0)
    graph = traced(Means().double(), images(3, 4, 6))
    assert len({node.args[1:] for node in graph.graph.nodes if node.target is ops.affine}) >= 4
    check(Means().double(), images(3, 4, 6), fires=False)


class Normed(nn.Module):
    """Each step's values are normed over the samples by hand: mean and variance come as one result."""

    def __init__(self, feedback: bool) -> None:
        super().__init__()
        self.fc, self.lif, self.out, self.feedback = nn.Linear(6, 5), ArgumentLIF(), nn.Linear(5, 3), feedback

    def forward(self, x: Tensor) -> Tensor:
        v, s, steps = None, torch.zeros(x.shape[1], 5, dtype=x.dtype), []
        for t in range(x.shape[0]):
            y = self.fc(x[t]) + s if self.feedback else self.fc(x[t])
            variance, mean = torch.var_mean(y, 0, keepdim=True)
            s, v = self.lif((y - mean) * torch.rsqrt(variance + 1e-3), v)
            steps.append(self.out(s))
        return torch.stack(steps)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("steps", [2, 4])
def test_an_operation_with_several_results_runs_in_the_loop_with_what_reads_them(steps: int, feedback: bool) -> None:
    torch.manual_seed(0)
    graph = check(Normed(feedback).double(), images(steps, 7, 6), fires=False, in_dims=1, time_dims=0)
    loops = [node.target for node in graph.graph.nodes if isinstance(node.target, Loop)]
    assert any(node.target is torch.var_mean for loop in loops for node in loop.nodes())
    assert feedback or "runs step by step: var_mean is not known to treat samples apart" in graph.notes["fold-time"]
