"""Small graphs for tests of passes: a function traced as a module, and graphs run on copies of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from snnpart.frameworks import clone_leaf, reset_state
from snnpart.graph import BATCH_SIZE, Body, SpikeGraph
from snnpart.trace import trace


class Wrap(nn.Module):
    """A function of tensors as a module; keyword arguments become its attributes (layers, parameters, buffers)."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs) if not self._has_layers() else self.function(self, *inputs)

    def _has_layers(self) -> bool:
        return bool(self._modules or self._parameters or self._buffers)


def graph_of(
    function: Callable[..., Any], *inputs: Tensor, layers: dict[str, Any] | None = None, **dims: Any
) -> SpikeGraph:
    """The traced graph of a function, which takes the module first when it has layers."""
    return trace(Wrap(function, **(layers or {})), inputs, **dims)


def node_of(graph: SpikeGraph, name: str) -> fx.Node:
    """The node of this name."""
    return next(node for node in graph.graph.nodes if node.name == name)


def calls(graph: SpikeGraph, target: Any) -> list[fx.Node]:
    """The nodes that call `target`, in order."""
    return [node for node in graph.graph.nodes if node.target == target]


def execute(graph: SpikeGraph, inputs: Sequence[Tensor], *, seed: int = 0) -> dict[str, Tensor]:
    """Outputs, gradients of inputs and parameters for a fixed cotangent, and buffers afterwards."""
    body = _body(graph)
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    sizes = [graph.batch] if any(node.target == BATCH_SIZE for node in graph.graph.nodes) else []
    torch.manual_seed(seed)
    outputs = body.bind(graph.graph)(*given, *sizes)
    torch.manual_seed(seed + 1)
    loss = sum((y * torch.randn_like(y)).sum() for y in outputs if y.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    found = {f"output{k}": y.detach() for k, y in enumerate(outputs)}
    found |= {f"input{k}.grad": x.grad for k, x in enumerate(given) if x.grad is not None}
    found |= {f"{name}.grad": p.grad for name, p in body.named_parameters() if p.grad is not None}
    return found | dict(body.named_buffers())


def _body(graph: SpikeGraph) -> Body:
    tensors = {name: info.tensor.detach().clone() for name, info in graph.tensors.items()}
    leaves = {}
    for path, info in graph.leaves.items():
        inside = {i.name: tensors[i.name] for i in graph.tensors.values() if i.leaf == path}
        prefix = len(path) + 1
        leaves[path] = clone_leaf(
            info.module, {name[prefix:]: _as(graph, name, value) for name, value in inside.items()}
        )
        reset_state(leaves[path])
    own = {n: (i.kind, _as(graph, n, tensors[n])) for n, i in graph.tensors.items() if i.leaf is None}
    body = Body(own, leaves)
    body.training = graph.traced_training
    return body


def _as(graph: SpikeGraph, name: str, value: Tensor) -> Tensor:
    info = graph.tensors[name]
    return nn.Parameter(value, info.tensor.requires_grad) if info.kind == "parameter" else value


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit, NaN equal to NaN."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value.nan_to_num(), b[name].nan_to_num()), name
