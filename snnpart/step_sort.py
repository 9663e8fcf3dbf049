"""How often each operation of an opened step must run.

    once    depends on the loop's fixed values and on tensors of the layers alone (`beta.clamp(0, 1)`)
    before  element-wise on the sequences: one call on [T, ...]
    each    leads to what is carried: step by step
    after   element-wise, and nothing carried depends on it: one call on [T, ...] (the spike of a membrane whose reset
            comes with the next step)

What runs after all steps reads values that are stacked for it, so it must not need more of those than it saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from snnpart import facts, ops
from snnpart.facts import Value
from snnpart.step_graph import Step, name_of

_NAMES = (
    "add sub rsub mul div pow maximum minimum eq ne lt le gt ge where clamp relu sigmoid tanh neg abs exp log sqrt "
    "rsqrt reciprocal square sin cos atan sign floor ceil round detach clone to float double half bfloat16 zeros_like "
    "ones_like logical_and logical_or logical_not heaviside erf softplus"
)
_ELEMENTWISE = frozenset(_NAMES.split())


@dataclass(frozen=True, eq=False)
class Sorted:
    """The operations of a step by how often they run."""

    step: Step
    once: tuple[fx.Node, ...]
    before: tuple[fx.Node, ...]
    each: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]


def sort_step(step: Step, batched: bool) -> Sorted:
    """Sort a step's operations; with `batched` False all that changes from step to step runs step by step."""
    nodes = step.operations
    varying = _reached(nodes, {*step.group("sequences"), *step.group("carried")})
    moved = _reached(nodes, set(step.group("carried")))
    ahead: set[fx.Node] = set()
    for node in nodes if batched else ():
        if node in varying and node not in moved and _in_one_call(node, varying) and _reads(node, step, ahead):
            ahead.add(node)
    late = _after(step, nodes, varying, ahead) if batched else set()
    return Sorted(
        step,
        tuple(node for node in nodes if node not in varying),
        tuple(node for node in nodes if node in ahead),
        tuple(node for node in nodes if node in varying and node not in ahead and node not in late),
        tuple(node for node in nodes if node in late),
    )


def _reads(node: fx.Node, step: Step, ahead: set[fx.Node]) -> bool:
    """Whether an operation on the sequences reads only those, what is made of them in one call, and fixed values."""
    own = {*step.group("sequences"), *ahead}
    return all(source in own or source.op != "placeholder" for source in node.all_input_nodes)


def _reached(nodes: Iterable[fx.Node], sources: set[fx.Node]) -> set[fx.Node]:
    """The sources and every node that depends on one."""
    found = set(sources)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _in_one_call(node: fx.Node, varying: set[fx.Node]) -> bool:
    """Whether the operation on [T, ...] computes every step's result: element-wise, on operands that vary in all dims
    of the result."""
    out = facts.get(node, Value)
    if out is None or not (isinstance(node.target, ops.Surrogate) or name_of(node) in _ELEMENTWISE):
        return False
    for source in node.all_input_nodes:
        value = facts.get(source, Value)
        if value is None or len(value.shape) > len(out.shape):
            return False
        if source in varying and len(value.shape) != len(out.shape):
            return False
    return True


def _after(step: Step, nodes: Sequence[fx.Node], varying: set[fx.Node], ahead: set[fx.Node]) -> set[fx.Node]:
    """What nothing carried depends on and can be made in one call of values that are stacked: no more than before."""
    carried, results = set(step.carried), set(step.results)
    needed, given = ancestors(carried), {*step.group("sequences"), *ahead, *carried}
    late = {n for n in nodes if n in varying and n not in needed and n not in ahead and _in_one_call(n, varying)}
    dropped = late
    while dropped:
        dropped = {node for node in late if not _fits_late(node, late, varying, given, results)}
        late -= dropped
    stacked = {source for node in late for source in node.all_input_nodes if source in carried}
    return late if len(stacked | (results - late)) <= len(results) else set()


def _fits_late(
    node: fx.Node, late: set[fx.Node], varying: set[fx.Node], given: set[fx.Node], results: set[fx.Node]
) -> bool:
    """Whether the node reads only what there is of all steps, and is read late or as a result."""
    sources = (source for source in node.all_input_nodes if source in varying)
    readers = {user for user in node.users if user.op != "output"}
    return all(s in given or s in late for s in sources) and readers <= late and bool(readers or node in results)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they depend on."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def first_carried(step: Step, first: Step) -> tuple[fx.Node, ...] | None:
    """The nodes of `first`, a step that begins otherwise, which stand where `step` reads its carried values; None when
    the two differ in more."""
    given = step.shape.sequences + step.shape.fixed
    found: dict[fx.Node, fx.Node] = dict(zip(step.inputs[:given], first.inputs[:given], strict=True))
    own = step.group("carried")
    if not _same(step.outputs, first.outputs, found, set(own)):
        return None
    return tuple(found[node] for node in own) if all(node in found for node in own) else None


def _same(one: Any, other: Any, found: dict[fx.Node, fx.Node], free: set[fx.Node]) -> bool:
    if isinstance(one, (tuple, list)):
        return (
            isinstance(other, (tuple, list))
            and len(one) == len(other)
            and all(_same(a, b, found, free) for a, b in zip(one, other, strict=True))
        )
    if not isinstance(one, fx.Node):
        return type(one) is type(other) and bool(one == other)
    if not isinstance(other, fx.Node):
        return False
    if name_of(one) == "detach" and name_of(other) != "detach":  # what begins without a gradient needs none taken off
        return _same(one.args[0], other, found, free)
    if one in found:
        return found[one] is other
    if one in free:
        a, b = facts.get(one, Value), facts.get(other, Value)
        fits = a is not None and b is not None and (a.shape, a.dtype) == (b.shape, b.dtype)
    else:
        fits = (one.op, one.target) == (other.op, other.target) and one.op != "placeholder"
        fits = fits and _same(
            (one.args, tuple(one.kwargs.items())), (other.args, tuple(other.kwargs.items())), found, free
        )
    if fits:
        found[one] = other
    return fits


def extract(nodes: Iterable[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    """A graph of some nodes: it takes the values of `inputs` and returns those of `outputs`."""
    graph = fx.Graph()
    made = {node: graph.placeholder(f"x{i}") for i, node in enumerate(inputs)}
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in outputs))
    return graph
