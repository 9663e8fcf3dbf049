"""FSDP2's units: which parameters are gathered and reduced together, and whether they are sharded again after forward.

The parameters of a stage in the order in which a forward comes to them make a chain of atoms: those of an occurrence of
a repeated block, or of a module outside of blocks. k units are the cut of the chain into k pieces whose largest is
smallest in bytes. What a step takes is simulated for a rank of two, which computes and communicates at a time:

    forward    a unit computes when it is gathered; the gather of the next one starts then
    backward   the same the other way round where parameters were sharded again; a unit's reduce-scatter starts when it
               has computed
    copies     a kernel into or out of the buffer of each collective, in the stream that computes

With few units the first gather and the last reduce-scatter, which nothing hides, are large; with many there are many
launches and latencies. The number is the fastest one; of those that are as fast the least, or, where parameters are
sharded again after forward, the most. That takes a second gather and leaves about two units whole at any time; it is
chosen where it costs at most `_WORTH` of a step, as it does where the gathers are hidden. It is not with one or two
units, nor where a pipeline would gather for each of many microbatches, unless its memory is bounded.

Why not a unit for each block always: below some megabytes a collective takes its latency, whatever it carries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from torch import fx

from snnpart import facts
from snnpart.costs import MachineProfile
from snnpart.facts import Block, Cost, Stage
from snnpart.graph import SpikeGraph, TensorInfo
from snnpart.ops_time import leaf_paths

_RANKS = 2
"""dp ranks of the simulation: how many there will be is known at launch. More move the same bytes in more messages."""
_WORTH = 0.02
_SLACK = 0.001
"""Times that differ by less are equal."""
_MOST = 16


@dataclass
class Atom:
    """Parameters that stay in one unit: what they are called in the plan, their bytes, and the time of what follows
    them up to the next atom, in microseconds."""

    paths: list[str] = field(default_factory=list)
    bytes: float = 0.0
    forward_us: float = 0.0
    backward_us: float = 0.0


@dataclass(frozen=True)
class Units:
    """The decision: the plan's `units` and `reshard`."""

    units: Mapping[str, int]
    reshard: bool


def decide_units(
    graph: SpikeGraph,
    profile: MachineProfile,
    *,
    tp: int = 1,
    microbatches: int = 1,
    memory: int = 0,
    count: int | None = None,
    reshard: bool | None = None,
) -> Units:
    """Units of a graph with `Stage` and `Cost` facts.

    Args:
        memory: bytes that a rank may take; where it is bounded, a pipeline too may gather for each microbatch.
        count: units of each stage instead of the fastest number; at most as many as there are atoms.
        reshard: whether parameters are sharded again after forward, instead of where that is cheap.
    """
    chains = [chain for _, chain in sorted(atoms_by_stage(graph, tp).items())]
    found = {again: [_best(c, profile, again, microbatches, count) for c in chains] for again in (False, True)}
    times = {again: sum(time for time, _ in cuts) for again, cuts in found.items()}
    again = reshard
    if again is None:
        may = microbatches == 1 or memory > 0
        again = may and _frees(found[True]) and times[True] <= (1 + _WORTH) * times[False]
    units: dict[str, int] = {}
    number = 0
    for chain, (_, cuts) in zip(chains, found[again], strict=True):
        for first, last in pairwise(cuts):
            units.update((path, number) for atom in chain[first:last] for path in atom.paths)
            number += 1
    return Units(dict(sorted(units.items())), again)


def _frees(cuts: Sequence[tuple[float, Sequence[int]]]) -> bool:
    """Whether a stage has more units than are whole at a time."""
    return any(len(borders) > 3 for _, borders in cuts)


def _best(
    chain: Sequence[Atom], profile: MachineProfile, again: bool, microbatches: int, count: int | None
) -> tuple[float, list[int]]:
    """The time of a step and the borders of the units (0, ..., the number of atoms)."""
    most = min(len(chain), count or _MOST)
    cuts = balanced([atom.bytes for atom in chain], most)
    times = [step_us(_united(chain, c), profile, again=again, microbatches=microbatches) for c in cuts]
    equal = [number for number, time in enumerate(times) if time <= min(times) * (1 + _SLACK)]
    best = most - 1 if count is not None else equal[-1 if again else 0]
    return times[best], cuts[best]


def _united(chain: Sequence[Atom], cuts: Sequence[int]) -> list[Atom]:
    """One atom for each unit."""
    return [
        Atom(
            bytes=sum(atom.bytes for atom in chain[first:last]),
            forward_us=sum(atom.forward_us for atom in chain[first:last]),
            backward_us=sum(atom.backward_us for atom in chain[first:last]),
        )
        for first, last in pairwise(cuts)
    ]


def balanced(sizes: Sequence[float], most: int) -> list[list[int]]:
    """Borders of 1, 2, ..., `most` consecutive pieces, none empty, the largest as small as can be."""
    total = [0.0, *accumulate(sizes)]
    ends = range(len(total))
    largest, before = [total], [[0] * len(total)]
    for pieces in range(1, most):
        cut = [
            min(range(pieces, end), key=lambda at, end=end: max(largest[-1][at], total[end] - total[at]), default=0)  # type: ignore[misc]
            for end in ends
        ]
        largest.append([max(largest[-1][at], total[end] - total[at]) for end, at in zip(ends, cut, strict=True)])
        before.append(cut)
    found = []
    for pieces in range(most):
        borders = [len(sizes)]
        for cut in before[pieces::-1]:
            borders.append(cut[borders[-1]])
        found.append(borders[::-1])
    return found


def step_us(units: Sequence[Atom], profile: MachineProfile, *, again: bool, microbatches: int) -> float:
    """Microseconds of a step's forwards and backwards, optimizer and pipeline left out."""
    clock, back = _Clock(profile), units[::-1]
    for number in range(microbatches):
        clock.sweep(units, [unit.forward_us for unit in units], 0 if again or number == 0 else len(units))
    for number in range(microbatches):
        there = len(units) if not again else int(microbatches == 1)  # the last unit stays for the backward that follows
        clock.sweep(back, [unit.backward_us for unit in back], there, reduces=number + 1 == microbatches)
    return max(clock.now, clock.talking)


@dataclass
class _Clock:
    """When the computation and the communication that were begun so far end."""

    profile: MachineProfile
    now: float = 0.0
    talking: float = 0.0

    def sweep(self, units: Sequence[Atom], times: Sequence[float], there: int, reduces: bool = False) -> None:
        """A pass over the units, of which the first `there` are whole: each gather starts when the unit before
        computes."""
        ready = self.now if there else self._gather(units[0])
        for place, (unit, time) in enumerate(zip(units, times, strict=True)):
            if place >= there:
                self.now = max(self.now, ready) + self._copy_us(unit)
            if there <= place + 1 < len(units):
                ready = self._gather(units[place + 1])
            self.now += time
            if reduces:
                self.now += self._copy_us(unit)
                scatter = self.profile.reduce_scatter_us("dp", unit.bytes, _RANKS)
                self.talking = max(self.now, self.talking) + scatter

    def _gather(self, unit: Atom) -> float:
        self.talking = max(self.now, self.talking) + self.profile.all_gather_us("dp", unit.bytes, _RANKS)
        return self.talking

    def _copy_us(self, unit: Atom) -> float:
        return self.profile.kernel_us(0.0, 2 * unit.bytes)


def atoms_by_stage(graph: SpikeGraph, tp: int) -> dict[int, list[Atom]]:
    """The chain of each stage that has parameters to shard."""
    chains: dict[int, _Chain] = {}
    seen: set[str] = set()
    in_leaves = graph.in_leaves()
    for node in graph.graph.nodes:
        stage = facts.get(node, Stage)
        if stage is None or node.op in ("placeholder", "get_attr", "output"):
            continue
        chain = chains.setdefault(stage.index, _Chain(tp))
        for name in _read_by(node, graph, in_leaves):
            if name not in seen:
                seen.add(name)
                chain.take(graph.tensors[name], facts.get(node, Block))
        chain.count(facts.get(node, Cost))
    return {index: list(chain.atoms.values()) for index, chain in chains.items() if chain.atoms}


@dataclass
class _Chain:
    """A stage's atoms, by the block or the module that they are of."""

    tp: int
    atoms: dict[tuple[str, int], Atom] = field(default_factory=dict)
    _of_owner: dict[str, tuple[str, int]] = field(default_factory=dict)
    _now: Atom | None = None

    def take(self, info: TensorInfo, block: Block | None) -> None:
        """The next parameter that is read, for the first time in this stage."""
        owner = info.name.rpartition(".")[0] or info.name
        key = self._of_owner.setdefault(owner, (block.name, block.index) if block else (owner, -1))
        self._now = self.atoms.setdefault(key, Atom())
        if owner not in self._now.paths:
            self._now.paths.append(owner)
        self._now.bytes += info.tensor.numel() * info.tensor.element_size() / self.tp

    def count(self, cost: Cost | None) -> None:
        """The time of an operation is that of the atom before it."""
        if cost is not None and self._now is not None:
            share = cost.share(self.tp)
            self._now.forward_us += share.forward_us
            self._now.backward_us += share.backward_us


def _read_by(node: fx.Node, graph: SpikeGraph, in_leaves: Mapping[str, Iterable[str]]) -> list[str]:
    """The parameters that learn and that a node reads itself or through its layers."""
    names = [str(source.target) for source in node.all_input_nodes if source.op == "get_attr"]
    names += [name for path in leaf_paths(node) for name in in_leaves.get(path, ())]
    infos = [graph.tensors[name] for name in names if name in graph.tensors]
    return [info.name for info in infos if info.used and info.tensor.requires_grad and info.tensor.dim()]
