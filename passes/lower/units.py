"""Where a stage's graph comes to the first and the last reader of the parameters of each FSDP2 unit.

A view of a parameter has its memory, so whoever reads the view reads the parameter. What is computed from parameters
alone counts as one too: few operations give back what they were given (`expand_as`, `to`), but none here is trusted not
to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from snnpart import facts
from snnpart.facts import Gathers
from snnpart.ops_later import later
from snnpart.ops_time import leaf_paths
from snnpart.passes.analyze.kinds import VIEWS, name_of
from snnpart.passes.decide.stages import lookup
from snnpart.plan import Plan
from snnpart.program import StageProgram, TensorSlice

_ROUNDED = frozenset(["linear", *(f"conv{way}{dims}d" for way in ("", "_transpose") for dims in (1, 2, 3))])
"""Operations before which autocast rounds all operands."""


def with_units(programs: Mapping[tuple[int, int], StageProgram], plan: Plan) -> dict[tuple[int, int], StageProgram]:
    """The programs with the plan's units on their tensors and graphs; nothing changes without FSDP2."""
    if plan.dp != "fsdp2":
        return dict(programs)
    return {at: _with_units(program, plan) for at, program in programs.items()}


def _with_units(program: StageProgram, plan: Plan) -> StageProgram:
    rounds = frozenset.intersection(*map(read_rounded, program.graphs))
    tensors = tuple(
        replace(part, unit=lookup(plan.units, part.name) or 0, rounds=part.name in rounds and part.leaf is None)
        if part.requires_grad and part.has_gradient
        else part
        for part in program.tensors
    )
    for graph in program.graphs:
        mark_units(graph, tensors)
    return replace(program, tensors=tensors)


def mark_units(graph: fx.Graph, slices: Iterable[TensorSlice]) -> None:
    """Write `Gathers` on the nodes that are the first or the last to read from a unit of the slices."""
    units_of = ((part.unit, (part.name, *part.aliases)) for part in slices if part.unit is not None)
    inside = {name: unit for unit, names in units_of for name in names}
    first: dict[int, fx.Node] = {}
    last: dict[int, fx.Node] = {}
    for node, units in readers(graph, inside):
        for unit in units:
            first.setdefault(unit, node)
            last[unit] = node
    for node in {**dict.fromkeys(first.values()), **dict.fromkeys(last.values())}:
        begins = tuple(sorted(unit for unit, at in first.items() if at is node))
        ends = tuple(sorted(unit for unit, at in last.items() if at is node and node.op != "output"))
        facts.put(node, Gathers(begins, ends))


def read_rounded(graph: fx.Graph) -> frozenset[str]:
    """The tensors with one reader, which autocast runs in half precision: on a GPU and on the CPU alike.

    With several it depends on autocast's cache whether their gradients are added in half precision.
    """
    found: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            found.setdefault(str(node.target), []).extend(_users(node))
    return frozenset(name for name, users in found.items() if len(users) == 1 and name_of(users[0]) in _ROUNDED)


def _users(node: fx.Node) -> list[fx.Node]:
    """Who reads a tensor, also what reads it through `later`."""
    return [reader for user in node.users for reader in (user.users if user.target is later else [user])]


def readers(graph: fx.Graph, unit_of: Mapping[str, int]) -> Iterable[tuple[fx.Node, frozenset[int]]]:
    """The nodes that read parameters, in order, with the units of these; by name, tied ones too."""
    shares: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            shares[node] = frozenset([unit_of[node.target]] if node.target in unit_of else ())
            continue
        inputs = node.all_input_nodes
        units = frozenset(unit for source in inputs for unit in shares.get(source, ()))
        viewed = inputs[:1] if name_of(node) in VIEWS else inputs
        if inputs and all(source in shares for source in viewed):
            shares[node] = units
        leaves = tuple(f"{path}." for path in leaf_paths(node))
        if leaves:
            units |= {unit for name, unit in unit_of.items() if name.startswith(leaves)}
        if units:
            yield node, units
