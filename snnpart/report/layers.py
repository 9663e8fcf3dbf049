"""What the report says of layers: which are split and how, which stay whole and why, and what a stage holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from snnpart import facts
from snnpart.facts import Cost
from snnpart.ops_later import later
from snnpart.passes.analyze.kinds import VIEWS, name_of
from snnpart.program import CompiledProgram, StageProgram, TensorSlice
from snnpart.report import nodes
from snnpart.report.data import CollectiveRow, ReplicatedRow, ShardRow

WHOLE = frozenset({"replicate", "replicated"})
NOTE = "replicated "
"""Notes of the placement begin with this word, then the module path or the node."""

CHEAPER = "cheaper whole: no split of it pays for its collectives"


def sharded(compiled: CompiledProgram, moves: tuple[CollectiveRow, ...]) -> tuple[ShardRow, ...]:
    """Every layer with a tensor that is split over tp, in the order in which they run."""
    rows = []
    for stage in range(compiled.plan.stage_count):
        ranks = [compiled.stage(stage, tp) for tp in range(compiled.plan.tp)]
        found = operations(compiled, ranks[0])
        split = {t.name.rpartition(".")[0] for t in ranks[0].tensors if t.dim is not None}
        split |= {path for path, rule in compiled.plan.shards.items() if rule not in WHOLE and path in ranks[0].leaves}
        order = {path: place for place, path in enumerate(found)}
        for path in sorted(split, key=lambda path: order.get(path, len(order))):
            rows.append(_sharded_row(path, stage, ranks, compiled, moves, found))
    return tuple(rows)


def _sharded_row(
    path: str,
    stage: int,
    ranks: list[StageProgram],
    compiled: CompiledProgram,
    moves: tuple[CollectiveRow, ...],
    found: dict[str, str],
) -> ShardRow:
    here = [move for move in moves if move.module == path and move.stage == stage]
    slices = [[t for t in rank.tensors if t.name.rpartition(".")[0] == path] for rank in ranks]
    return ShardRow(
        module=path,
        operation=found.get(path, ""),
        stage=stage,
        rule=compiled.plan.shards.get(path, "shard"),
        tensors=_describe(list(zip(*slices, strict=True))),
        collectives=tuple(dict.fromkeys(move.operation for move in here)),
        bytes_per_step=sum(move.forward_bytes + move.backward_bytes for move in here),
    )


def _describe(tensors: list[tuple[TensorSlice, ...]]) -> tuple[str, ...]:
    """`weight, bias: S(0) 32+32`, `w: R`: the layer's parameters and buffers, those that lie alike together."""
    alike: dict[str, list[str]] = {}
    for versions in tensors:
        if versions[0].kind != "constant":
            alike.setdefault(_spread(versions), []).append(versions[0].name.rpartition(".")[2])
    return tuple(f"{', '.join(names)}: {spread}" for spread, names in alike.items())


def _spread(versions: Iterable[TensorSlice]) -> str:
    """How one tensor lies, from its slices on every rank."""
    first, *rest = versions
    if first.dim is None:
        return "R" + (" (gradient summed)" if first.partial_gradient else "")
    dim = first.dim
    return f"S({dim}) " + "+".join(str(t.shape[dim]) for t in (first, *rest))


def replicated(compiled: CompiledProgram) -> tuple[ReplicatedRow, ...]:
    """With tp > 1: what every tp rank holds or computes whole: layers with a weight of two or more dims, and whatever
    else the decision made a note of."""
    if compiled.plan.tp == 1:
        return ()
    rows = []
    reasons = {key.removeprefix(NOTE): text for key, text in compiled.source.notes.items() if key.startswith(NOTE)}
    for stage in range(compiled.plan.stage_count):
        program = compiled.stage(stage, 0)
        found = operations(compiled, program)
        split = {t.name.rpartition(".")[0] for t in program.tensors if t.dim is not None}
        weights = [t for t in program.tensors if t.kind == "parameter" and len(t.global_shape) > 1]
        for path in dict.fromkeys(t.name.rpartition(".")[0] for t in weights):
            if path not in split:
                rows.append(ReplicatedRow(path, found.get(path, ""), reasons.pop(path, CHEAPER)))
    return (*rows, *(ReplicatedRow(name, "", reason) for name, reason in reasons.items()))


def operations(compiled: CompiledProgram, program: StageProgram) -> dict[str, str]:
    """Module path -> the operation with most flops of those that read the module's tensors; in the order they run.
    Layers that run inside another's operation come last, with their class."""
    costs = nodes.costs(compiled)
    found: dict[str, tuple[float, str]] = {}
    for node in program.graph.nodes:
        for path in _paths_read(node):
            flops = costs.get(node.name, Cost()).flops
            if path not in found or flops > found[path][0]:
                found[path] = (flops, nodes.operation(node, compiled))
    inside = {path: type(info.module).__name__ for path, info in program.leaves.items() if path not in found}
    return {path: name for path, (_, name) in found.items()} | inside


def _paths_read(node: fx.Node) -> set[str]:
    """The modules whose tensors the operation reads, as they are or through a view of them."""
    if node.op == "call_module":
        return {str(node.target)}
    if node.target in nodes.MOVES or _tensor_of(node) is not None:
        return set()
    read = (_tensor_of(item) for item in node.all_input_nodes)
    return {str(tensor.target).rpartition(".")[0] for tensor in read if tensor is not None}


def _tensor_of(node: fx.Node) -> fx.Node | None:
    """The tensor of the network that the node reads, or hands on."""
    while (node.target is later or name_of(node) in VIEWS) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node if node.op == "get_attr" and facts.get(node, facts.Value) is not None else None


def modules_of(table: Mapping[str, int], index: int, order: Sequence[str] = ()) -> tuple[str, ...]:
    """The modules of a stage (`Plan.stages`) or a unit (`Plan.units`), each the highest path that lies whole in it
    (`layer1` for all below it); those on `order` (module paths as they run) come first, in its order."""
    where: dict[str, set[int]] = {}
    for path, at in table.items():
        for prefix in _prefixes(path):
            where.setdefault(prefix, set()).add(at)
    whole = {path for path, found in where.items() if found == {index} and path}
    paths = dict.fromkeys((*order, *table))
    return tuple(dict.fromkeys(_highest(path, whole) for path in paths if whole.intersection(_prefixes(path))))


def _highest(path: str, whole: set[str]) -> str:
    return next(prefix for prefix in _prefixes(path) if prefix in whole)


def _prefixes(path: str) -> list[str]:
    """`a.b.c` -> a, a.b, a.b.c."""
    atoms = path.split(".")
    return [".".join(atoms[: length + 1]) for length in range(len(atoms))]
