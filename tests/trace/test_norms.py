"""Norms: one node for both modes, and what they write at every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart import ops
from snnpart.trace import trace
from tests.neurons import data, fill
from tests.trace.parity import check


def norms(model: nn.Module, *shape: int, **options: Any) -> list[tuple[Any, ...]]:
    graph = check(fill(model), data(*shape) * 2, **options)
    assert not graph.training_specialised
    return [node.args for node in graph.graph.nodes if node.target is ops.batch_norm]


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(4), (5, 4)),
        (nn.BatchNorm1d(4), (5, 4, 3)),
        (nn.BatchNorm2d(4, momentum=None), (3, 4, 3, 3)),
        (nn.BatchNorm3d(4, affine=False), (3, 4, 2, 2, 2)),
        (nn.BatchNorm2d(4, track_running_stats=False), (3, 4, 3, 3)),
    ],
)
def test_batch_norm_is_one_node_for_both_modes(norm: nn.Module, shape: tuple[int, ...]) -> None:
    (args,) = norms(nn.Sequential(norm, nn.Identity()), *shape, others=data(7, *shape[1:]))
    assert args[6].target == "training"


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, self.w, training=self.training, momentum=0.2)


def test_functional_batch_norm() -> None:
    (args,) = norms(Functional(), 5, 4)
    assert (args[3].target, args[6].target, args[7]) == ("mean", "training", 0.2)


def test_a_frozen_norm_keeps_its_mode() -> None:
    model = fill(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model.train()
    model[1].eval()
    graph = trace(model, data(5, 4))
    (node,) = [node for node in graph.graph.nodes if node.target is ops.batch_norm]
    assert node.args[6] is False
    (found,) = [a for a in graph.assumptions if a.kind == "mode"]
    assert found.text == "module '1' stays in eval mode, as it is in the model"


class Synchronised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.bn = nn.Linear(4, 4), nn.SyncBatchNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.l(x)) + x.new_tensor([1, 2, 3, 4])


def test_sync_batch_norm_is_a_batch_norm() -> None:
    graph = trace(fill(Synchronised()), data(3, 4))
    assert sum(node.target is ops.batch_norm for node in graph.graph.nodes) == 1
    assert [a.kind for a in graph.assumptions] == ["batch norm", "neuron"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(nn.InstanceNorm1d, (2, 3, 4)), (nn.InstanceNorm2d, (2, 3, 4, 5)), (nn.InstanceNorm3d, (2, 3, 2, 4, 4))],
)
def test_an_instance_norm_with_running_statistics(kind: Any, shape: Any, momentum: Any, training: bool) -> None:
    norm = kind(3, track_running_stats=True, affine=True, momentum=momentum)
    model = fill(nn.Sequential(norm, nn.Linear(shape[-1], 4)))
    norm.running_mean.copy_(data(3)), norm.running_var.copy_(data(3).abs() + 0.5)
    model.train(training)
    graph = check(model, data(*shape), others=data(5, *shape[1:], k=0.3), training=training)
    written = {node.args[0].target for node in graph.graph.nodes if node.target is ops.assign}
    assert written == ({"0.running_mean", "0.running_var"} if training else set())
    assert graph.training_specialised


def test_an_instance_norm_called_at_every_step_updates_as_often() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm1d(3, track_running_stats=True)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.norm(step) for step in x])

    check(fill(Twice()), data(4, 2, 3, 5), in_dims=1)
    check(fill(Twice()), data(4, 3, 5), in_dims=None)
