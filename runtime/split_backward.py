"""Backward of one microbatch in two halves: gradients of what the stage received, later those of its weights.

The stage before waits for the first half only; zero-bubble schedules fill their gaps with the second.

Take the autograd graph from the roots down. Some nodes lead to received values, some to parameters, some to both. A
*gate* is a node that leads to a received value and has a next node that leads to parameters only (a convolution and its
weight, a weight and its standardisation). The first half is `autograd.grad` down to the received values; at each gate
it keeps the gradient that arrives. The second half starts at each gate with what was kept, one step down to the
weights' side, sums, and runs the weights' side once. What one gate alone reads (a parameter, its transpose) has its
whole gradient after that step, which is accumulated at once: those of a stage are not all there beside their sums.

This is sound if one step down is the only way from a gate to that side. A parameter read at several steps of a chain
breaks it (the stage therefore gives each reader its own view of a parameter, `views_for_readers`; a loop inside a layer
cannot), and so do gradient hooks, which would run twice. Then the first half is the whole backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from snnpart import compat

Edge = tuple[Any, int]
Backward = Callable[[Sequence[Any], Sequence[Tensor | None]], None]


@dataclass
class Halves:
    """One microbatch's backward. `roots` and `grads` as for `torch.autograd.backward`; `received` are leaves."""

    roots: Sequence[Tensor]
    grads: Sequence[Tensor | None]
    received: Sequence[Tensor]
    _kept: dict[Any, Sequence[Tensor | None]] = field(default_factory=dict)
    _graph: _Graph | None = None

    def inputs(self, whole: Backward) -> None:
        """Set `.grad` of the received values; `whole` runs an ordinary backward where halves would be wrong."""
        if not self.received or not self.roots:
            return
        graph = _Graph(self.roots, self.received)
        if not graph.splits:
            whole(self.roots, self.grads)
            self.roots = ()
            return
        self._graph = graph
        hooks = [gate.register_prehook(self._keeper(gate)) for gate in graph.gates]
        try:
            found = torch.autograd.grad(
                self.roots, list(self.received), list(self.grads), retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        for x, grad in zip(self.received, found, strict=True):
            x.grad = grad

    def _keeper(self, gate: Any) -> Callable[[Sequence[Tensor | None]], None]:
        def keep(arriving: Sequence[Tensor | None]) -> None:
            self._kept[gate] = tuple(arriving)

        return keep

    def weights(self) -> None:
        """Accumulate the gradients of the parameters, once for each, in many calls of autograd."""
        if self._graph is not None:
            _accumulate(self._at_the_weights(self._graph))
        elif self.roots:
            torch.autograd.backward(list(self.roots), list(self.grads))
        self.roots, self._graph, self._kept = (), None, {}

    def _at_the_weights(self, graph: _Graph) -> dict[Edge, Tensor | None]:
        """The gradients that arrive on the weights' side, over all gates and the roots that lie there themselves, but
        for those of what one gate alone reads: they are accumulated."""
        summed: dict[Edge, Tensor | None] = {}
        for root, grad in zip(self.roots, self.grads, strict=True):
            edge = get_gradient_edge(root)
            if edge.node in graph.weights_only:
                at = (edge.node, edge.output_nr)
                _add(summed, at, torch.ones_like(root) if grad is None else grad)
        for gate in reversed(graph.gates):  # from the roots on, as a backward comes to FSDP2's units
            own: dict[Edge, Tensor | None] = {}
            for below, grad in self._below(gate, graph).items():
                _add(own if below[0] in graph.read_once else summed, below, grad)
            _accumulate(own)
        return summed

    def _below(self, gate: Any, graph: _Graph) -> dict[Edge, Tensor | None]:
        """The gradients one step down from a gate, on the weights' side; what was kept for it goes."""
        arriving = [(i, grad) for i, grad in enumerate(self._kept.pop(gate, ())) if grad is not None]
        below = [edge for edge in dict.fromkeys(gate.next_functions) if edge[0] in graph.weights_only]
        if not arriving:
            return {}
        found = torch.autograd.grad(
            [GradientEdge(gate, i) for i, _ in arriving],
            [GradientEdge(*edge) for edge in below],
            [grad for _, grad in arriving],
            allow_unused=True,
        )
        return dict(zip(below, found, strict=True))


def _add(summed: dict[Edge, Tensor | None], edge: Edge, grad: Tensor | None) -> None:
    if grad is not None:
        before = summed.get(edge)
        summed[edge] = grad if before is None else before + grad


def _accumulate(gradients: dict[Edge, Tensor | None]) -> None:
    """Go on with backward from edges at which these gradients arrive."""
    if gradients:
        torch.autograd.backward([GradientEdge(*edge) for edge in gradients], list(gradients.values()))


class _Graph:
    """The autograd graph below some roots: its gates, its weights' side, and whether it can be split."""

    def __init__(self, roots: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        stops = {id(x) for x in received}
        tops = [get_gradient_edge(root).node for root in roots]
        order = _children_first(tops)
        self._parents: dict[Any, list[Any]] = {}
        to_input: set[Any] = set()
        to_weight: set[Any] = set()
        hooked = False
        for node in order:
            variable = getattr(node, "variable", None)
            if variable is not None:
                (to_input if id(variable) in stops else to_weight).add(node)
                hooked |= id(variable) not in stops and compat.has_gradient_hooks(variable)
            for below, _ in node.next_functions:
                if below is not None:
                    self._parents.setdefault(below, []).append(node)
                    to_input.update([node] if below in to_input else [])
                    to_weight.update([node] if below in to_weight else [])
        self.weights_only = to_weight - to_input
        inner = [n for n in order if n in to_input]
        self.gates = [n for n in inner if any(below in self.weights_only for below, _ in n.next_functions)]
        self.read_once = self._read_once([n for n in order if n in self.weights_only], set(tops))
        self.splits = not hooked and all(map(self._one_way, self._borders()))

    def _borders(self) -> list[Any]:
        """The nodes of the weights' side right below a gate."""
        return list(dict.fromkeys(b for gate in self.gates for b, _ in gate.next_functions if b in self.weights_only))

    def _read_once(self, children_first: Sequence[Any], tops: set[Any]) -> set[Any]:
        """The nodes of the weights' side to which one way leads only, as to all below them."""
        found: set[Any] = set()
        for node in children_first:
            shared = node in tops or len(set(self._parents[node])) > 1
            if not shared and all(below is None or below in found for below, _ in node.next_functions):
                found.add(node)
        return found

    def _one_way(self, border: Any) -> bool:
        """Whether no node that uses the border lies above another one that does."""
        users = set(self._parents[border])
        if len(users) == 1:
            return True
        stack, above = list(users), set()
        while stack:
            for node in self._parents.get(stack.pop(), ()):
                if node in users:
                    return False
                if node not in above:
                    above.add(node)
                    stack.append(node)
        return True


def _children_first(roots: Sequence[Any]) -> list[Any]:
    """The nodes below the roots, each after all of its next nodes."""
    order: list[Any] = []
    seen: set[Any] = set()
    stack = [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((below, False) for below, _ in node.next_functions if below is not None and below not in seen)
    return order


def views_for_readers(graph: fx.Graph) -> None:
    """Give each reader of a tensor in the graph a view of its own, so that autograd has one node for each reading."""
    for read in [node for node in graph.nodes if node.op == "get_attr" and len(node.users) > 1]:
        for user in [user for user in read.users if user.op != "output"]:
            with graph.inserting_before(user):
                own = graph.call_function(_own_view, (read,))
            user.replace_input_with(read, own)


def _own_view(x: Any) -> Any:
    """A view of a tensor that learns; anything else (a buffer, the training flag) itself."""
    return compat.own_view(x) if isinstance(x, Tensor) and x.requires_grad else x
