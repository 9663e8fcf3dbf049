"""What the user asks of the sharding: `shard={"layer4.*": "column", "fc": "replicate"}` as pins of the placement.

A name is a module path (with all below it), or a pattern with `*`, `?` and `[...]`; of two that match, the later
counts. A rule holds for the convolutions, linears and embeddings that match; norms, neurons and the rest follow them.
Only where none matches does a name stand for what follows, and then "shard", "group" and "replicate" can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from snnpart.errors import PlanError
from snnpart.graph import SpikeGraph
from snnpart.passes.decide.lanes import REPLICATE, Lanes, find_lanes, path_of

RULES = ("column", "row", "scatter", "group", "shard", REPLICATE)
WRITTEN_OUT = 64
"""Steps of a time loop, at most, that are written out to share a matrix inside it: a graph of more copies takes long to
place, and that many collectives outweigh what is shared."""


def pins_for(graph: SpikeGraph, tp: int, shard: Mapping[str, str]) -> dict[str, str]:
    """Module path -> rule, as `Plan.shards` has it.

    Raises:
        PlanError: a rule that is not known, a name that nothing matches.
    """
    for name, rule in shard.items():
        if rule not in RULES:
            raise PlanError(f"shard={{'{name}': {rule!r}}} asks for a rule that is not known", choices=RULES)
    if tp == 1 or not shard:
        return {}
    matrices, followers = _paths(find_lanes(graph, tp), graph)
    pins: dict[str, str] = {}
    for name, rule in shard.items():
        found = _matching(name, matrices) or _matching(name, followers)
        others = [] if found else _matching(name, _called(graph))
        if not found and not others:
            raise _nothing(name, [*matrices, *followers], graph)
        # what cannot be shared may be asked to stay whole; the placement refuses other rules, with the reason
        pins.update(dict.fromkeys(found or (others if rule != REPLICATE else ()), rule))
    return pins


def to_share(shard: str | Mapping[str, str], planned: Mapping[str, str] | None) -> Callable[[str, int], bool]:
    """Whether a matrix inside a time loop (path of its layer, steps) is to be dealt out: where the given plan does so,
    else as asked for. The fastest plan (`shard="time"`) leaves it whole: a collective a step costs more."""
    if planned is not None:
        return lambda path, steps: planned.get(path, REPLICATE) != REPLICATE
    rules = {"*": "column" if shard == "max" else REPLICATE} if isinstance(shard, str) else {"*": "column", **shard}
    last = lambda path: next(rule for name, rule in reversed(rules.items()) if _matching(name, [path]))  # noqa: E731
    return lambda path, steps: steps <= WRITTEN_OUT and last(path) != REPLICATE


def _paths(lanes: Lanes, graph: SpikeGraph) -> tuple[list[str], list[str]]:
    """Paths of layers that deal out channels, and of those that can follow them."""
    matrices = [group.path for group in lanes.groups if group.path]
    able = {path_of(node) for node in lanes.rows} - {""} - set(matrices)
    order = dict.fromkeys(path_of(node) for node in graph.graph.nodes)
    return matrices, [path for path in order if path in able]


def _called(graph: SpikeGraph) -> list[str]:
    """Paths of all layers that compute something."""
    called = (node for node in graph.graph.nodes if node.op.startswith("call_"))
    return [path for path in dict.fromkeys(map(path_of, called)) if path]


def _matching(name: str, paths: Iterable[str]) -> list[str]:
    """The path itself, or all that the pattern matches; a path without wildcards also names what lies below it."""
    return [path for path in paths if fnmatchcase(path, name) or path.startswith(name + ".")]


def _nothing(name: str, paths: list[str], graph: SpikeGraph) -> PlanError:
    near = get_close_matches(name, paths, n=5, cutoff=0.4) or paths[:8]
    return PlanError(
        f"shard= names '{name}', which no layer of the network matches",
        where=graph.name,
        fix="use the path of a layer as named_modules() has it, or a pattern such as 'layer4.*'",
        choices=near,
    )
