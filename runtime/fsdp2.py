"""FSDP2: parameters, gradients and optimizer state in shards over dp, gathered and reduced in units.

The program says which parameters form a unit (`TensorSlice.unit`) and where a stage's graph comes to the first and the
last operation that reads one (`facts.Gathers`); calls of `begin` and `end` are put there when the graph is bound.

    forward    begin(u) waits for the gather of u and starts that of u + 1
               end(u) frees u where parameters are sharded again after forward; without `reshard` they stay
    backward   an operation that reads from what autograd kept gathers u and starts the gather of u - 1; when all its
               gradients are there u is freed. In two halves (`split_backward`) only the second one makes gradients:
               until then units stay, unless a forward frees them
    last one   when all its gradients are there u's reduce-scatter starts, if all units behind u have started theirs

So a gather runs while the unit before computes, in both directions, and a reduce-scatter while the units before
compute. Collectives run on a stream of their own, which waits for and is waited for by events: a CUDA graph holds all
of it. Without `reshard` each unit is gathered once a step, however many microbatches there are.

Every rank reduces the same units in the same order, with zeros for a parameter that got no gradient; with `reshard` a
backward must come to the same units on all ranks. Which parameters the loss reaches the ranks tell each other on the
CPU when all units are under way that were reached in the step before, as a loss may be another one than there; what got
its gradient after that is sent on its own. A captured step cannot ask, and has those of the steps that ran before it.

Some stay whole on every rank, their gradients averaged: scalars, which FSDP2 cannot cut, and what never gets a
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from snnpart import compat, facts
from snnpart.errors import LaunchError
from snnpart.facts import Gathers
from snnpart.ops_packed import PackedInput
from snnpart.program import StageProgram
from snnpart.runtime.collectives import Axis
from snnpart.runtime.ranks import control_device
from snnpart.runtime.reduction import Alone, average
from snnpart.runtime.stage import Stage
from snnpart.runtime.unit import Member, Unit, make_unit


@dataclass(frozen=True)
class _Kept:
    """A parameter, or a view of one, that autograd keeps for backward."""

    unit: Unit
    tensor: Tensor


class Fsdp2(Alone):
    """The units of a rank's stages, in the order in which a forward comes to them."""

    def __init__(self, stage: Stage, axis: Axis, *, reshard: bool = False) -> None:
        super().__init__(stage, axis)
        assert axis.group is not None
        self._reshard, self._last, self._next = reshard, False, 0
        self._half: torch.dtype | None = None
        held = dict(stage.parameters())
        apart = {name for name, p in held.items() if _stays_whole(p, stage.slices[name].has_gradient)}
        self._apart = [held[name] for name in apart]
        numbers: dict[int, list[tuple[str, nn.Parameter, bool]]] = {}
        for name, parameter in held.items():
            if name not in apart:
                part = stage.slices[name]
                rounds = part.rounds and parameter.dtype is torch.float32 and not compat.has_gradient_hooks(parameter)
                numbers.setdefault(part.unit or 0, []).append((name, parameter, rounds))
        mesh = DeviceMesh.from_group(axis.group, stage.device.type)
        self.units = [make_unit(number, numbers[number], axis, mesh) for number in sorted(numbers)]
        self._of_name = {member.name: unit for unit in self.units for member in unit.members}
        self._of_memory: dict[int, Unit] = {}
        for unit in self.units:
            for member in unit.members:
                self._listen(unit, member, member.whole)
        stage.sharded = {member.name: member.shard for unit in self.units for member in unit.members}
        stage.gathering = self
        for path in stage.leaves if reshard else ():
            self._watch_leaf(path)

    def _listen(self, unit: Unit, member: Member, parameter: nn.Parameter) -> None:
        self._of_memory[compat.storage_key(parameter)] = unit
        parameter.register_post_accumulate_grad_hook(lambda _: self._arrived(unit, member))

    def _round(self, unit: Unit, half: torch.dtype | None) -> None:
        """Have the graph read rounded parameters where it may, or whole ones again."""
        unit.round(half)
        for member in unit.members:
            if member.rounds:
                read = member.whole if half is None or member.narrow is None else member.narrow
                path, _, last = self.stage.paths[member.name].rpartition(".")
                setattr(self.stage.module.get_submodule(path), last, read)
                if not compat.has_accumulation_hooks(read):
                    self._listen(unit, member, read)

    def mark(self, graph: fx.Graph, program: StageProgram) -> None:
        """Have a stage's graph begin and end units; one that it does not mention is begun at the start."""
        self._check_rounded(program)
        mine = {unit.number for part in program.tensors if (unit := self._of_name.get(part.name)) is not None}
        begun: set[int] = set()
        for node in list(graph.nodes):
            found = facts.get(node, Gathers) or Gathers()
            for number in mine.intersection(found.begins):
                with graph.inserting_before(node):
                    graph.call_function(self.begin, (number,))
                begun.add(number)
            read = self._read_by(node) if self._reshard and _may_hide(node) else []
            if read:
                with graph.inserting_after(node):
                    graph.call_function(self.watch, (node, *read))
            for number in mine.intersection(found.ends):
                with graph.inserting_after(node):
                    graph.call_function(self.end, (number,))
        first = next(node for node in graph.nodes if node.op != "placeholder")
        for number in sorted(mine - begun):
            with graph.inserting_before(first):
                graph.call_function(self.begin, (number,))

    def _check_rounded(self, program: StageProgram) -> None:
        rounded = {member.name for member in self._members() if member.rounds}
        odd = [part.name for part in program.tensors if part.name in rounded and not part.rounds]
        if odd:
            raise LaunchError(
                f"{odd[:5]} are gathered in half precision under autocast, but one graph reads them whole",
                where=self.stage.place,
                fix='launch with precision="fp32", or use dp="ddp"',
            )

    def _read_by(self, node: fx.Node) -> list[int]:
        names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
        return sorted({self._of_name[name].number for name in names if name in self._of_name})

    def _at(self, number: int) -> int:
        return next(i for i, unit in enumerate(self.units) if unit.number == number)

    def begin(self, number: int) -> None:
        """The graph comes to the unit."""
        at = self._at(number)
        self.units[at].gather()
        for unit in self.units[at + 1 : at + 2]:
            unit.start()

    def end(self, number: int) -> None:
        """The graph reads nothing of the unit any more. A backward begins with the last one, which is kept for it."""
        if self._reshard and not (number == self.units[-1].number and torch.is_grad_enabled()):
            self.units[self._at(number)].free()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A block, a stage's forward, in which autograd keeps parameters without their memory."""
        if not self._reshard or not torch.is_grad_enabled():
            yield
            return
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, x: Tensor) -> Any:
        unit = self._of_memory.get(compat.storage_key(x))
        return x.detach() if unit is None else _Kept(unit, x.detach())

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, _Kept):
            self._gather_back(kept.unit)
            found: Tensor = kept.tensor
            return found
        assert isinstance(kept, Tensor)
        return kept

    def _gather_back(self, unit: Unit) -> None:
        """A backward comes to the unit."""
        if not unit.is_whole:
            unit.gather()
        at = self.units.index(unit)
        for before in self.units[max(at - 1, 0) : at]:
            if before.waiting:
                before.start()

    def watch(self, result: Any, *numbers: int) -> None:
        """Gather the units when backward comes to what made the result: it may keep parameters out of our sight."""
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.grad_fn.register_prehook(lambda _: self._gather_back_all(numbers))

    def _gather_back_all(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._gather_back(self.units[self._at(number)])

    def _watch_leaf(self, path: str) -> None:
        parts = (part for name, part in self.stage.slices.items() if name in self._of_name)
        inside = [p for p in parts if any(name.startswith(f"{path}.") for name in (p.name, *p.aliases))]
        numbers = sorted({self._of_name[part.name].number for part in inside})
        if numbers:
            self.stage.leaves[path].register_forward_hook(lambda _, __, result: self.watch(result, *numbers))

    def prepare(self, half: torch.dtype | None) -> None:
        """Gather the first unit while the stage waits for its inputs."""
        self._refuse_hooks()
        if half is not self._half:
            self._half = half
            for unit in self.units:
                self._round(unit, half)
        for unit in self.units[:1]:
            unit.start()

    def backward(self, roots: Sequence[Tensor], grads: Sequence[Tensor | None], last: bool) -> None:
        with self._counting(last):
            super().backward(roots, grads, last)

    @contextmanager
    def in_pieces(self) -> Iterator[None]:
        """Units stay from piece to piece until their gradients are there."""
        with self._counting(last=False):
            yield

    @contextmanager
    def _counting(self, last: bool) -> Iterator[None]:
        """One microbatch's backward: count which gradients of each unit are there, and free what is left."""
        self._last, self._next = last, 0
        for unit in self.units:
            unit.waiting = len(unit.expected)
        yield
        for unit in self.units if self._reshard else ():
            unit.free()

    def _arrived(self, unit: Unit, member: Member) -> None:
        """A member's gradient is there; one in half precision is added up in that of the parameter."""
        if member.narrow is not None:
            member.keep()
        unit.waiting -= 1
        if unit.waiting == 0 and self._reshard:
            unit.free()
        order = self.units[::-1]
        while self._last and self._next < len(order) and order[self._next].waiting <= 0:
            if order[self._next].expected:
                order[self._next].reduce()
            for earlier in order[max(self._next - 2, 0) : max(self._next - 1, 0)]:
                earlier.settle()  # it has had two units' time, and holds memory
            self._next += 1

    def finish(self) -> None:
        for unit in reversed(self.units):
            if unit.expected and not unit.is_reduced:
                unit.reduce()
        reached, late = self._told()
        for unit in reversed(self.units):
            if unit.names & late:
                unit.reduce()
        for unit in self.units:
            unit.finish(reached)
        average([p.grad for p in self._apart if p.grad is not None], self.axis)
        for member in self._members():
            compat.run_accumulation_hooks(member.shard)

    def _told(self) -> tuple[frozenset[str], frozenset[str]]:
        """The parameters that the loss reaches on any dp rank, and those whose gradients are not on their way."""
        here = [m.name in self._of_name[m.name].sent or m.has_gradient for m in self._members()]
        late = [m.has_gradient for m in self._members()]
        if self.stage.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._check_as_before(here)
        else:
            both = self._anywhere([*here, *late])
            here, late = both[: len(here)], both[len(here) :]
        names = [member.name for member in self._members()]
        return frozenset(n for n, yes in zip(names, here) if yes), frozenset(n for n, yes in zip(names, late) if yes)

    def _anywhere(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag whether it is set on any rank of the axis."""
        assert self.axis.group is not None
        found = torch.tensor(flags, dtype=torch.uint8, device=control_device(self.axis.group, self.stage.device))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.axis.group)
        return [bool(flag) for flag in found.tolist()]

    def _check_as_before(self, here: Sequence[bool]) -> None:
        for member, reached in zip(self._members(), here, strict=True):
            if reached != (member.name in self._of_name[member.name].expected):
                raise LaunchError(
                    f"the loss reaches '{member.name}' in some steps only",
                    where=self.stage.place,
                    fix='use the same outputs in every loss, or launch with execution="eager"',
                )

    def _members(self) -> Iterator[Member]:
        return (member for unit in self.units for member in unit.members)

    def _refuse_hooks(self) -> None:
        """Hooks on what the user was given: backward never sees it."""
        for member in self._members():
            if compat.has_gradient_hooks(member.shard):
                raise LaunchError(
                    f"a hook was registered on '{member.name}', which under dp=\"fsdp2\" is a shard that backward does "
                    "not see",
                    where=self.stage.place,
                    fix="register it on the model's parameter before parallelize(), or use "
                    "register_post_accumulate_grad_hook",
                )

    def rest(self) -> None:
        for unit in self.units:
            unit.free()

    def forget(self) -> None:
        self._last = False
        for unit in self.units:
            unit.forget()


def _stays_whole(parameter: Tensor, has_gradient: bool) -> bool:
    return parameter.dim() == 0 or parameter.numel() == 0 or not (has_gradient and parameter.requires_grad)


def _may_hide(node: fx.Node) -> bool:
    """Whether we may not see what a node keeps for backward: a user's autograd function may do so without autograd's
    knowledge, and hooks of its own take the place of ours."""
    function = getattr(node.target, "__self__", None)
    return isinstance(node.target, PackedInput) or (isinstance(function, type) and issubclass(function, Function))
