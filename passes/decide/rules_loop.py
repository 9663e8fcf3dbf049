"""The row of a time loop: what stays inside one channel at every step can be shared by channels as a whole.

The rows of the operations inside are found as in a graph of their own, from how the loop's inputs lie. Collectives
cannot stand inside a loop, so every operation there must take its inputs as they lie; where a matrix inside is to be
shared, the loop is written out before (`rewrite.unfold_feedback`). Carried values are taken to lie
like an input of the same form (a membrane like the current that it sums), and must lie so after each step.
"""

from __future__ import annotations

from torch import fx

from snnpart import facts
from snnpart.effects import is_random
from snnpart.facts import Placement, Sharded, Spread, Value
from snnpart.graph import output_node
from snnpart.ops_time import Loop
from snnpart.passes.analyze.kinds import first_value
from snnpart.passes.decide.rules import Ask, Declined, R, Row, Rule, checked, is_tensor
from snnpart.passes.decide.rules_local import POOLS, functions
from snnpart.passes.decide.rules_matrix import is_matrix
from snnpart.passes.rewrite.local_sizes import local_arguments
from snnpart.passes.rewrite.shared_statistics import STATISTICS

Lane = Sharded | None
_NEEDS_CHANNELS = functions((*POOLS, "interpolate", "amax", "amin", "max", "min", "conv1d", "conv2d", "conv3d"))


def loop_rule(follow: Rule) -> Rule:
    """The rule for loops, given that for the operations inside (`table.follow`)."""

    def rule(node: fx.Node, ask: Ask) -> Row:
        return _Inside(node, ask, follow).row()

    return rule


class _Inside:
    def __init__(self, node: fx.Node, ask: Ask, follow: Rule) -> None:
        assert isinstance(node.target, Loop)
        self.node, self.loop, self.ask, self.follow = node, node.target, ask, follow
        self.sequences, self.fixed, self.carried = (tuple(part) for part in node.args)  # type: ignore[union-attr, arg-type]
        self.cut: dict[fx.Node, Sharded] = {}

    def row(self) -> Row:
        """The row, with tensors of the network that are the same at every step (thresholds) cut as what reads them."""
        while True:
            try:
                return self._found()
            except _Cut as needs:
                self.cut[needs.tensor] = needs.lane

    def _found(self) -> Row:
        lanes = [_step_lane(self.ask.lane(x)) for x in self.sequences]
        lanes += [self.cut.get(x, self.ask.lane(x)) for x in self.fixed]
        inputs = [node for node in self.loop.body.nodes if node.op == "placeholder"]
        known = [(node, lane) for node, lane in zip(inputs, lanes) if lane is not None]
        carried = [_like(node, known) for node in inputs[len(lanes) :]]
        results = [self._walk(graph, [*lanes, *carried]) for graph in self.loop.graphs]
        if any(result[: len(carried)] != carried for result in results):
            raise Declined("what it carries from step to step lies otherwise after a step")
        return self._row(results[0][len(carried) :], results[-1][len(carried) :], carried)

    def _row(self, results: list[Lane], first: list[Lane], carried: list[Lane]) -> Row:
        if results != first:
            raise Declined("its results lie otherwise at the first step")
        outputs = {
            lane if keep == "last" or lane is None else Sharded(lane.dim + 1, lane.pieces)
            for lane, keep in zip(results, self.loop.keep, strict=True)
        }
        output = outputs.pop() if len(outputs) == 1 else None
        if output is None:
            raise Declined("its results do not lie alike")
        begins = dict(zip(self.carried, carried, strict=True))
        inputs = tuple(self._spread(source, begins.get(source)) for source in self.node.all_input_nodes)
        partial = tuple(i for i, n in enumerate(self.node.all_input_nodes) if inputs[i] == R and _learns(n))
        return Row("shard", output, inputs, partial)

    def _spread(self, source: fx.Node, begins: Lane) -> Spread:
        """A first value of full size is cut as the values after it; an empty one or a number stays whole."""
        value = facts.get(source, Value)
        if begins is None or value is None:
            return self.cut.get(source) or self.ask.lane(source) or R
        size = max(stop for own in begins.pieces for _, stop in own)
        fits = len(value.shape) > begins.dim and value.shape[begins.dim] == size
        return begins if fits else R

    def _walk(self, graph: fx.Graph, given: list[Lane]) -> list[Lane]:
        """The lanes of what the graph returns."""
        lanes: dict[fx.Node, Lane] = {}
        inside = Ask(self.ask.graph, self.ask.tp, lanes)
        waiting = iter(given)
        for node in graph.nodes:
            if node.op == "placeholder":
                lanes[node] = next(waiting)
            elif node.op != "output" and any(lanes.get(n) is not None for n in node.all_input_nodes):
                lanes[node] = self._lane(node, inside)
        return [lanes.get(n) if isinstance(n, fx.Node) else None for n in output_node(graph).args[0]]  # type: ignore[union-attr]

    def _cut_tensor(self, source: fx.Node, wanted: Spread) -> None:
        """Raise `_Cut` where what an operation reads otherwise than it lies is a tensor that can be cut."""
        inputs = [node for node in source.graph.nodes if node.op == "placeholder"]
        fixed = dict(zip(inputs[len(self.sequences) :], self.fixed))
        outer = fixed.get(source)
        if outer is not None and outer.op == "get_attr" and outer not in self.cut and isinstance(wanted, Sharded):
            raise _Cut(outer, wanted)

    def _lane(self, node: fx.Node, inside: Ask) -> Lane:
        if is_matrix(node):
            raise Declined(f"{node.name} inside it needs all channels at every step")
        if is_random(node):
            raise Declined(f"{node.name} inside it draws random numbers for all channels at every step")
        found = checked(node, self.follow(node, inside))
        if isinstance(found.output, Sharded) and _idles(found.output) and node.target in _NEEDS_CHANNELS:
            raise Declined(f"{node.name} inside it cannot run on a rank without channels")
        if found.rule == STATISTICS:
            raise Declined(f"{node.name} inside it normalises over the sharded dim")
        for source, wanted in zip(node.all_input_nodes, found.inputs, strict=True):
            if wanted != (inside.lane(source) or R):
                self._cut_tensor(source, wanted)
                raise Declined(f"{node.name} inside it needs an operand otherwise than it lies")
        if isinstance(found.output, Sharded):
            placement = Placement(found.rule, found.output, found.inputs)
            if local_arguments(node, placement, 0) != (node.args, dict(node.kwargs)):
                raise Declined(f"{node.name} inside it has a number of channels among its arguments")
            return found.output
        return None


class _Cut(Exception):
    """A tensor of the network that the loop reads must be cut."""

    def __init__(self, tensor: fx.Node, lane: Sharded) -> None:
        super().__init__()
        self.tensor, self.lane = tensor, lane


def _idles(lane: Sharded) -> bool:
    """Whether some rank has no channel."""
    return any(not own for own in lane.pieces)


def _like(node: fx.Node, known: list[tuple[fx.Node, Sharded]]) -> Lane:
    """The lane of an input with as many dims as the carried value, and as many channels."""
    value = first_value(node)
    for other, lane in known:
        form = first_value(other)
        assert form is not None  # it has a lane
        if value is not None and len(form.shape) == len(value.shape) and form.shape[lane.dim] == value.shape[lane.dim]:
            return lane
    return None


def _step_lane(lane: Lane) -> Lane:
    if lane is not None and lane.dim == 0:
        raise Declined("its steps are sharded")
    return None if lane is None else Sharded(lane.dim - 1, lane.pieces)


def _learns(node: fx.Node) -> bool:
    value = facts.get(node, Value)
    return is_tensor(node) and value is not None and value.requires_grad
