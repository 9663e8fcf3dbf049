"""Folded against eager: outputs, every gradient and every buffer, in a network that fires."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from snnpart import facts, text
from snnpart.gate.compare import compare
from snnpart.gate.observe import (
    Observed,
    _finish,
    arguments,
    copies,
    observe_graph,
    observe_module,
    same_random_numbers,
)
from snnpart.graph import SpikeGraph
from snnpart.ops_time import Loop
from snnpart.pass_manager import PassManager
from snnpart.passes.analyze import kinds
from snnpart.passes.rewrite.canonicalize import Canonicalize
from snnpart.passes.rewrite.fold_time import FoldTime
from snnpart.trace import trace
from tests.calibrate import is_neuron

_STATELESS = ("conv", "linear", "norm", "pool")


def traced(module: nn.Module, inputs: Any, **dims: Any) -> SpikeGraph:
    """The canonical graph with all its copies."""
    graph = trace(module, inputs, training=module.training, **dims)
    PassManager((Canonicalize(),)).run(graph)
    return graph


def fold(graph: SpikeGraph) -> SpikeGraph:
    """A folded copy, verified."""
    folded = graph.copy()
    PassManager((FoldTime(),)).run(folded)
    return folded


def run(graph: SpikeGraph, inputs: Any) -> Observed:
    """What a graph, loops included, computes over copies of its tensors."""
    seen = Observed(structure=graph.out_spec)
    body, tensors = copies(graph)
    with same_random_numbers(inputs):
        outputs = body.bind(graph.graph)(*arguments(graph, inputs))
        _finish(seen, outputs, tensors, body, graph)
    return seen


def check(module: nn.Module, inputs: Any, *, fires: bool = True, **dims: Any) -> SpikeGraph:
    """Fold the module's graph and compare it with the module itself; the folded graph."""
    graph = traced(module, inputs, **dims)
    if fires:
        assert_active(graph, inputs)
    folded = fold(graph)
    want, got = observe_module(module, graph, inputs), run(folded, inputs)
    own = [name for name, info in graph.tensors.items() if info.leaf is None]
    want.buffers = {name: value for name, value in want.buffers.items() if name in own}
    got.buffers = {name: value for name, value in got.buffers.items() if name in own}
    _, wrong = compare(want, got)
    assert not wrong, wrong
    written = text.print_graph(folded)
    assert text.print_graph(text.parse_graph(written)) == written
    return folded


def assert_active(graph: SpikeGraph, inputs: Any) -> None:
    """Every neuron layer fires, and every parameter that is read has a gradient."""
    seen = observe_graph(graph, inputs)
    integrators = {path for path, leaf in graph.leaves.items() if not is_neuron(leaf.module)}
    rates = {layer: seen.rate(layer) for layer in seen.spikes if layer not in integrators}
    silent = {layer: rate for layer, rate in rates.items() if not 0.01 <= rate <= 0.99}
    assert rates and not silent, rates
    for name, info in graph.tensors.items():
        if info.used and info.kind == "parameter" and info.tensor.requires_grad:
            gradient = seen.gradients[name]
            assert gradient is not None and bool((gradient != 0).any()), name


def active(module: nn.Module, dtype: torch.dtype = torch.float64, scale: float = 2.0) -> nn.Module:
    """The module with larger weights, so that its neurons fire."""
    module = module.to(dtype)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                layer.weight.mul_(scale)
                if layer.bias is not None:
                    layer.bias.abs_()
    return module


def images(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random inputs, positive on average."""
    return torch.randn(shape, dtype=torch.float64).add(0.3).to(dtype)


def repeated(graph: SpikeGraph) -> list[str]:
    """Layers without state that stand more than once, or inside a loop."""
    found: list[str] = []
    seen: set[Any] = set()
    for node in graph.graph.nodes:
        inside = list(node.target.nodes()) if isinstance(node.target, Loop) else []
        found += [inner.name for inner in inside if kinds.kind_of(inner) in _STATELESS]
        layer = _layer(node)
        found += [node.name] if layer in seen else []
        seen |= {layer} if layer is not None else set()
    return found


def _layer(node: fx.Node) -> Any:
    """What tells a layer from others: the tensors that it reads, or where a pooling is called."""
    kind = kinds.kind_of(node)
    if kind not in _STATELESS:
        return None
    tensors = tuple(source.target for source in node.all_input_nodes if source.op == "get_attr")
    return (kind, tensors) if tensors else (kind, node.target, facts.origin(node))
