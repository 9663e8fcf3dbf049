"""Find the first node of a graph whose value is not what the user's module computes there.

The module runs with a hook on every submodule, the graph node by node. Where a submodule was called as often as the
graph has runs of nodes from it, the last node of each run holds what the call returned.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from snnpart import facts
from snnpart.frameworks import preserved, reset_state
from snnpart.gate.compare import HALF_TOLERANCE, TOLERANCES
from snnpart.gate.observe import Observed, Reset, Watch, arguments, call_module, copies, same_random_numbers, set_mode
from snnpart.graph import SpikeGraph


def first_difference(model: nn.Module, graph: SpikeGraph, inputs: Any, reset: Reset | None) -> fx.Node | None:
    """The first node that ends a submodule's call with another value than the call had; None when all agree."""
    wanted = _module_outputs(model, graph, inputs, reset)
    checks = _last_nodes(graph, {path: len(values) for path, values in wanted.items()})
    body, _ = copies(graph)
    found: list[fx.Node] = []

    class Compare(Watch):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if not found and n in checks and not _close(wanted[checks[n][0]][checks[n][1]], value):
                found.append(n)
            return value

    with same_random_numbers(inputs), torch.no_grad():
        Compare(body, graph, Observed()).run(*arguments(graph, inputs))
    return found[0] if found else None


def _module_outputs(model: nn.Module, graph: SpikeGraph, inputs: Any, reset: Reset | None) -> dict[str, list[Any]]:
    """What every call of every submodule returned: path -> one entry a call."""
    seen: dict[str, list[Any]] = defaultdict(list)

    def note(path: str) -> Any:
        return lambda module, args, output: seen[path].append(pytree.tree_map(_kept, output))

    with preserved(model), same_random_numbers(inputs), torch.no_grad():
        reset_state(model, reset, graph.window_buffers())
        set_mode(model, graph.traced_training)
        handles = [module.register_forward_hook(note(path)) for path, module in model.named_modules() if path]
        try:
            call_module(model, graph, inputs)
        finally:
            for handle in handles:
                handle.remove()
    return dict(seen)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _last_nodes(graph: SpikeGraph, calls: dict[str, int]) -> dict[fx.Node, tuple[str, int]]:
    """The node that ends call number i of a submodule -> (path, i), where runs of nodes and calls can be paired."""
    ends: dict[str, list[fx.Node]] = defaultdict(list)
    before = ""
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        path = str(node.target) if node.op == "call_module" else facts.origin(node).module
        if path == before and node.op != "call_module" and ends[path]:
            ends[path][-1] = node
        else:
            ends[path].append(node)
        before = path
    return {
        node: (path, at)
        for path, nodes in ends.items()
        if len(nodes) == calls.get(path)
        for at, node in enumerate(nodes)
    }


def _close(want: Any, got: Any) -> bool:
    """Whether two results agree; results that cannot be compared count as agreeing."""
    if not isinstance(want, Tensor):
        leaves = [leaf for leaf in pytree.tree_leaves(want) if isinstance(leaf, Tensor)]
        others = [leaf for leaf in pytree.tree_leaves(got) if isinstance(leaf, Tensor)]
        return len(leaves) != len(others) or all(_close(a, b) for a, b in zip(leaves, others))
    if not isinstance(got, Tensor) or want.shape != got.shape or want.dtype != got.dtype:
        return True
    tolerance = TOLERANCES.get(want.dtype, HALF_TOLERANCE)
    scale = float(want.abs().max()) if want.numel() else 0.0
    return bool(torch.allclose(want, got, rtol=0.0, atol=tolerance * max(scale, 1e-30), equal_nan=True))
