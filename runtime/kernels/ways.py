"""The ways in which a fused neuron runs on a GPU, and which of them is taken.

    kernel    generated from the neuron's step (`fused_neuron`)
    compiled  what torch.compile makes of the region
    plain     the operations of the region, one by one

A node says which (`FusedNeuron.way`); "measured" means the fastest of the three for this kind of neuron, dtype, layout
and size, which this machine finds out once (`choices`). Every way computes in float32 or more, whatever x's dtype, and
gives a result of x's dtype, or of the dtype of x and the residual together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx

from snnpart.fingerprint import short_hash
from snnpart.frameworks import adapter_for
from snnpart.graph import Body, output_node
from snnpart.neuron_scan import order_of_scan
from snnpart.ops_fused import FusedNeuron, parts, sequence_of
from snnpart.ops_norm import wide
from snnpart.ops_time import Nested, leaf_paths
from snnpart.runtime.compiled import compiled
from snnpart.runtime.kernels.choices import Choices
from snnpart.scan_order import Order

Function = Callable[..., Tensor]


class Region:
    """A fused neuron's region in plain torch over a module. `places`: where x and the residual are in its arguments."""

    def __init__(self, target: FusedNeuron, module: Body) -> None:
        self._graph, self._parts = target.region, parts(target.region)
        found = self._parts
        order = [node for node in target.region.nodes if node.op == "placeholder"]
        self.places = [order.index(node) for node in (found.x, found.residual) if node is not None]
        leaves = {path: module.get_submodule(path) for path in leaf_paths(found.scan)}
        self.leaves, self._steps = list(leaves.values()), target.steps
        self._order = (
            order_of_scan(found.scan, leaves) if found.scan.op == "call_module" else Order()
        )  # a loop turns its own
        self._module, self._function = module, _plainly(module, target.region)

    def _run(self, *args: Any) -> Tensor:
        return self._function(self._module, *args)[0]  # type: ignore[no-any-return]

    @cached_property
    def _compiled(self) -> Function:
        """Each region's own function is compiled: of one that all shared torch would keep a few variants only."""
        made = compiled(self._function, getattr(self._module, "uncompiled", None))
        return lambda *args: made(self._module, *args)[0]

    def plain(self, *args: Any) -> Tensor:
        return self._wide(self._run, args)

    def compiled(self, *args: Any) -> Tensor:
        return self._wide(self._compiled, args)

    def rounded(self, scan: Function, p: Sequence[Tensor], args: Sequence[Any]) -> Tensor:
        """The region with `scan(x, *p)`, over steps first, in the place of its own."""

        def run(x: Tensor) -> Tensor:
            return self._order.as_layer(scan(self._order.steps_first(x, self._steps), *p))

        return self._wide(lambda *given: self._with(run, given), args)

    def _with(self, scan: Function, args: Sequence[Any]) -> Tensor:
        values, given = dict[fx.Node, Any](), iter(args)
        for node in self._graph.nodes:
            own, keywords = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)  # type: ignore[arg-type]
            if node.op == "placeholder":
                values[node] = next(given)
            elif node is self._parts.scan:
                made = scan(values[sequence_of(node)])
                values[node] = made if self._parts.result is None else {self._parts.result: made}
            elif node.op != "output":
                function = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
                values[node] = function(*own, **keywords)
        end: Tensor = values[output_node(self._graph).all_input_nodes[0]]
        return end

    def _wide(self, run: Function, args: Sequence[Any]) -> Tensor:
        given = [args[place] for place in self.places]
        dtype = given[0].dtype if len(given) == 1 else torch.promote_types(given[0].dtype, given[1].dtype)
        widened = list(args)
        for place, value in zip(self.places, given, strict=True):
            widened[place] = value.to(wide(value.dtype))
        return run(*widened).to(dtype)

    def reset(self) -> None:
        """Drop what a run left on the neuron layers."""
        for leaf in self.leaves:
            for part in leaf.modules():
                adapter_for(part).reset(part)


def _plainly(module: Body, graph: fx.Graph) -> Callable[..., tuple[Any, ...]]:
    """The graph as a function of the module and its placeholders, with loops as loops: nothing of ours is in it that a
    compiler would have to look into."""

    def bind(inner: fx.Graph) -> Callable[..., tuple[Any, ...]]:
        return partial(_plainly(module, inner), module)

    return module.function_of(graph, lambda item: item.over(bind) if isinstance(item, Nested) else item)


def fastest(choices: Choices, kind: str, ways: Mapping[str, Function], args: Sequence[Any], region: Region) -> str:
    """The way to run this kind, measured on copies of these values where it is not known."""
    gradients = torch.is_grad_enabled()
    return choices.choose(kind, {name: partial(_once, run, args, region, gradients) for name, run in ways.items()})


def _once(run: Function, args: Sequence[Any], region: Region, gradients: bool) -> None:
    """One forward, and one backward if there are gradients, on copies: buffers stay as they are."""
    own = [item.detach().clone() if isinstance(item, Tensor) else item for item in args]
    learned = [
        own[i].requires_grad_() for i, item in enumerate(args) if isinstance(item, Tensor) and item.requires_grad
    ]
    try:
        with torch.set_grad_enabled(gradients):
            y = run(*own)
            if y.requires_grad:
                torch.autograd.grad(y, learned, torch.ones_like(y), allow_unused=True)
    finally:
        region.reset()


def kind_of(texts: Sequence[str], x: Tensor, last: bool) -> str:
    """What equally fast neurons have in common: kernels (by their text), dtype, layout, size to a power of two, and
    whether there is a backward."""
    layout, size = "channels-last" if last else "contiguous", max(x.numel() - 1, 0).bit_length()
    passes = "backward" if torch.is_grad_enabled() and x.requires_grad else "forward"
    return f"{short_hash(''.join(texts))} {str(x.dtype).removeprefix('torch.')} {layout} 2^{size} {passes}"
