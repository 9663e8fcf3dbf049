"""How many of the T steps a folded network takes at a time.

More steps in one call mean fewer calls; but once the values of a round no longer fit the cache, every operation reads
and writes memory, and steps that are put together and taken apart are copied there. For each number of rounds the
smallest k that needs no more of them is timed (where it does not divide T, the first round takes the steps over):

    launches   rounds * operations * launch time
    messages   rounds * messages to the other tp ranks * the time of an empty one
    memory     bytes of all values, at the copy rate, if the values of k steps exceed the cache
    copies     bytes that loops and norms gather and part, if k > 1 and they exceed the cache

A profile without a cache (a GPU's launches decide) takes all steps at once.
"""

from __future__ import annotations

from torch import fx

from snnpart import facts, ops
from snnpart.costs import MachineProfile
from snnpart.errors import ConfigError
from snnpart.facts import Value, Values
from snnpart.graph import SpikeGraph
from snnpart.ops_time import Loop, batch_norm_steps
from snnpart.passes.analyze import kinds
from snnpart.passes.decide.placement import apply_shards
from snnpart.passes.rewrite.fold_rounds import Region, region, regions
from snnpart.passes.rewrite.shard_channels import shard_for_rank, twin
from snnpart.plan import Plan

_CACHED = 4.0
"""How many times faster than memory a last-level cache is."""

_PASSES = 3.0
"""Forward, and backward for two operands."""


def decide_rounds(graph: SpikeGraph, profile: MachineProfile, asked: bool | int, plan: Plan) -> tuple[int, str]:
    """Steps at a time (0: all of them), and why. `plan` says how channels lie on the tp ranks.

    Raises:
        ConfigError: a number was asked for, and the network cannot run in rounds.
    """
    wanted = asked if not isinstance(asked, bool) else 0
    if not wanted:
        return _decided(graph, profile, plan)
    found = _region(graph, profile, plan)
    if isinstance(found, str):
        raise ConfigError(f"fold={wanted}: {found}", where=f"network '{graph.name}'", fix="use fold=True")
    number = f"{wanted} of {found.steps}" if wanted < found.steps else f"all {found.steps}"
    return _plan(found, wanted), f"{number} steps at a time, as asked"


def _decided(graph: SpikeGraph, profile: MachineProfile, plan: Plan) -> tuple[int, str]:
    found = region(graph.graph)
    if isinstance(found, str):
        return 0, ""
    if not profile.cache:
        return 0, f"all {found.steps} steps at a time: launches decide on '{profile.name}'"
    chosen = _cheapest(found, profile, 1)
    if plan.tp == 1 or not chosen[0]:  # a tp rank's values are smaller, and messages make more rounds dearer
        return chosen
    own = _region(graph, profile, plan)
    return (0, "") if isinstance(own, str) else _cheapest(own, profile, plan.tp)


def runs_in_rounds(graph: SpikeGraph, profile: MachineProfile, plan: Plan) -> bool:
    """Whether the network can take some of its steps at a time."""
    return not isinstance(_region(graph, profile, plan), str)


def _region(graph: SpikeGraph, profile: MachineProfile, plan: Plan) -> Region | str:
    """The region of the whole network, on tp rank 0; a reason where not all ranks have the same one."""
    found = region(graph.graph)
    if plan.tp == 1 or isinstance(found, str):
        return found
    source = graph.copy()
    apply_shards(source, plan)
    ranks = dict.fromkeys(twin(source, rank) for rank in range(plan.tp))
    every = regions([shard_for_rank(source, plan.tp, rank, profile) for rank in ranks])
    return every if isinstance(every, str) else every[0]


def _plan(found: Region, together: int) -> int:
    """The number as the plan has it: 0 where all steps are taken at once."""
    return together if together < found.steps else 0


def _cheapest(found: Region, profile: MachineProfile, tp: int) -> tuple[int, str]:
    choices = sorted({-(-found.steps // rounds) for rounds in range(1, found.steps + 1)})
    messages = sum(node.target in ops.COLLECTIVES for node in found.nodes)
    waits = messages * profile.all_reduce_us("tp", 0.0, tp) if messages else 0.0
    times = {k: _microseconds(found, profile, k) + -(-found.steps // k) * waits for k in choices}
    best = min(choices, key=lambda k: (times[k], -k))
    size = _working_set(found) / found.steps
    why = f"{size / 2**20:.3g} MiB of values a step, {profile.cache / 2**20:.3g} MiB of cache on '{profile.name}'"
    number = f"all {found.steps}" if best == found.steps else f"{best} of {found.steps}"
    return _plan(found, best), f"{number} steps at a time: {why}"


def _microseconds(found: Region, profile: MachineProfile, k: int) -> float:
    """Of what differs between the choices."""
    calls = sum(kinds.name_of(node) not in kinds.VIEWS and not isinstance(node.target, Loop) for node in found.nodes)
    launches = -(-found.steps // k) * calls * profile.launch_us
    fits = k * _working_set(found) / found.steps <= profile.cache
    rate = profile.copy * (_CACHED if fits else 1.0)
    moved = sum(_written(node) for node in found.nodes) + (_gathered(found) if k > 1 and not fits else 0.0)
    return _PASSES * (launches + 1e6 * 2 * moved / rate)


def _working_set(found: Region) -> float:
    """Bytes of all steps that the largest operation reads and writes."""
    return max(_bytes(node) + sum(_bytes(source) for source in node.all_input_nodes) for node in found.nodes)


def _gathered(found: Region) -> float:
    """Bytes of all steps that are copied to put single steps together, or in backward to take them apart."""
    loops = (node for node in found.nodes if isinstance(node.target, Loop) or node.target is batch_norm_steps)
    return sum(_bytes(node) + sum(_bytes(source) for source in node.all_input_nodes) for node in loops)


def _written(node: fx.Node) -> float:
    return 0.0 if kinds.name_of(node) in kinds.VIEWS else _bytes(node)


def _bytes(node: fx.Node) -> float:
    value, several = facts.get(node, Value), facts.get(node, Values)
    items = [value] if value is not None else [] if several is None else several.items
    return float(sum(item.numel * item.dtype.itemsize for item in items if isinstance(item, Value)))
