"""What stands at each place of an order of parts: time, what crosses the boundary before it, and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from snnpart import facts
from snnpart.bits import packed_bytes, states_of
from snnpart.costs import MachineProfile
from snnpart.facts import Cost, Domain, Placement, Replicated, Sharded, Value
from snnpart.graph import SpikeGraph
from snnpart.ops_time import Loop, leaf_paths
from snnpart.passes.analyze.cost import kept_values, own_saved, storage
from snnpart.passes.analyze.kinds import first_value
from snnpart.passes.decide.cut import Held
from snnpart.passes.decide.memory import held_bytes
from snnpart.passes.decide.parts import NOWHERE, Part, Parts, is_tensor_read
from snnpart.passes.decide.rules_shape import value_bytes
from snnpart.passes.rewrite.shard_channels import LocalTensor, local_tensors


@dataclass(frozen=True, eq=False)
class Places:
    """The nodes of a network by their place in an order of parts."""

    graph: SpikeGraph
    order: Sequence[Part]
    at: Mapping[fx.Node, int]
    tp: int

    @classmethod
    def of(cls, graph: SpikeGraph, parts: Parts, order: Sequence[Part], tp: int) -> Places:
        """Each node at its own place for a part with keys, else at the latest of its inputs."""
        place = {part.position: i for i, part in enumerate(order)} | {NOWHERE: 0}
        found: dict[fx.Node, int] = {}
        for part in parts.parts:
            latest = max((found[node] for node in part.inputs() if node in found), default=0)
            found.update(dict.fromkeys(part.nodes, place[part.position] if part.keys else latest))
        return cls(graph, order, found, tp)

    @property
    def count(self) -> int:
        return len(self.order)

    def work(self) -> np.ndarray:
        """Microseconds of forward and backward at each place."""
        work = np.zeros(self.count)
        for node, place in self.at.items():
            cost = facts.get(node, Cost)
            if cost is not None:
                work[place] += cost.share(self.tp).us if _is_split(node) else cost.us
        return work

    def crossing(self, profile: MachineProfile) -> np.ndarray:
        """Microseconds to send what crosses the boundary before each place, forward and backward."""
        change = np.zeros((self.count + 1, 2))
        for node, place, last in self._sent():
            value = facts.need(node, Value)
            back = value.bytes if value.requires_grad else 0
            sizes = np.array([_wire_bytes(node, value), back]) * self._share(node)
            change[place + 1] += sizes
            change[last + 1] -= sizes
        alive = np.cumsum(change, axis=0)[: self.count]
        return np.array([_send(profile, forward) + _send(profile, back) for forward, back in alive])

    def held(self) -> Held:
        """Bytes at each place."""
        made, kept = self._kept()
        received = np.zeros(self.count + 1)
        first, last = np.zeros((self.count + 1, self.count + 1)), self.count
        for node, place, end in self._sent():
            size = facts.need(node, Value).bytes * self._share(node)
            received[place + 1] += size
            received[end + 1] -= size
            if storage(node) not in kept:
                first[place, end] += size
        sent = np.zeros((last + 1, last + 1))
        # first[p, q]: made at p, used last at q; of [i, j) are sent those with i <= p < j <= q
        beyond = np.cumsum(first[:, ::-1], axis=1)[:, ::-1]
        for j in range(1, last + 1):
            before = np.cumsum(beyond[:j, j][::-1])[::-1]
            sent[:j, j] = before
        return Held(self._tensors(), made, np.cumsum(received)[: self.count], sent)

    def _sent(self) -> Iterator[tuple[fx.Node, int, int]]:
        """Values that may cross a boundary, with the places where they are made and used last."""
        for node, place in self.at.items():
            if facts.get(node, Value) is None or node.op == "get_attr":
                continue
            uses = (self.at.get(user, self.count - 1 if user.op == "output" else place) for user in node.users)
            last = max(uses, default=place)
            if last > place:
                yield node, place, last

    def _kept(self) -> tuple[np.ndarray, set[fx.Node]]:
        """Bytes that are made at each place and kept for backward, and the values among them."""
        made, kept = np.zeros(self.count), set[fx.Node]()
        for node, place in self.at.items():
            cost, value = facts.get(node, Cost), first_value(node)
            if cost is None or value is None or not cost.backward_us:
                continue
            inside = isinstance(node.target, Loop)
            made[place] += (cost.saved if inside else own_saved(node, value)) * self._share(node)
            kept.update(item for item in kept_values(node) if item in self.at and not inside)
        for item in kept:
            made[self.at[item]] += value_bytes(item) * self._share(item)
        return made, kept

    def _tensors(self) -> np.ndarray:
        """Bytes of the tensors at each place, with a gradient and an optimizer's moments for those that learn."""
        local, places = local_tensors(self.graph), self._places_of_tensors()
        found = np.zeros(self.count)
        for name in self.graph.tensors:
            size = held_bytes(self.graph.tensors[name]) * _share_of_tensor(local.get(name))
            for place in places.get(name, {0}):
                found[place] += size
        return found

    def _places_of_tensors(self) -> Mapping[str, set[int]]:
        """Where each tensor is read, each copy by itself; one that nothing reads at the first place of its module."""
        read: dict[str, set[int]] = {}
        for node in filter(is_tensor_read, self.at):
            read.setdefault(str(node.target), set()).add(self.at[node])
        leaf = {path: place for node, place in self.at.items() for path in leaf_paths(node)}
        inside = self.graph.in_leaves()
        own = {name: {place} for path, place in leaf.items() for name in inside.get(path, ())}
        known = {**own, **read}
        unread = (name for name in self.graph.tensors if name not in known)
        return {**known, **{name: {_nearest(name, known)} for name in unread}}

    def _share(self, node: fx.Node) -> float:
        """The part of a value that the largest rank holds."""
        placement = facts.get(node, Placement)
        spread = placement.output if placement is not None else None
        return _part(spread) if isinstance(spread, Sharded) else 1.0


def _share_of_tensor(local: LocalTensor | None) -> float:
    """The part of a tensor that the largest tp rank holds."""
    spread = local.spread if local else None
    return _part(spread) if isinstance(spread, Sharded) else 1.0


def _nearest(name: str, known: Mapping[str, set[int]]) -> int:
    path = name.rpartition(".")[0]
    while path:
        inside = [min(places) for other, places in known.items() if other.startswith(f"{path}.")]
        if inside:
            return min(inside)
        path = path.rpartition(".")[0]
    return 0


def _part(spread: Sharded) -> float:
    sizes = [spread.size(rank) for rank in range(len(spread.pieces))]
    return max(sizes) / max(sum(sizes), 1)


def _is_split(node: fx.Node) -> bool:
    placement = facts.get(node, Placement)
    return placement is not None and not (
        isinstance(placement.output, Replicated) and all(isinstance(spread, Replicated) for spread in placement.inputs)
    )


def _wire_bytes(node: fx.Node, value: Value) -> int:
    """Bytes that cross a boundary forward: bits where the value has few states."""
    states = states_of(facts.get(node, Domain), value.dtype)
    return value.bytes if states is None else packed_bytes(value.numel, states[1])


def _send(profile: MachineProfile, size: float) -> float:
    return profile.send_us("pp", float(size)) if size > 0.5 else 0.0
