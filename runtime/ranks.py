"""This process among the ranks: device, mesh coordinate, process groups, and agreement before work begins.

Every axis has one process group per coordinate. The pipeline has two more, one for activations going forward and one
for gradients going backward: with NCCL each is a communicator of its own, so that a send one way never waits behind a
receive the other way.

A rank that finds a problem (NaN in its batch, a batch too small) must not leave the others in a collective. `agree` is
called by all ranks before the first communication of a step: if any rank has a problem, every rank raises it.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from snnpart.errors import LaunchError, SnnpartError
from snnpart.mesh import AXES, Coordinate, Mesh, mesh_for
from snnpart.runtime import waits
from snnpart.runtime.collectives import Axis, over_nccl

FORWARD, BACKWARD = "forward", "backward"
_worlds = itertools.count()
_AGREED = "_snnpart_raised_on_all_ranks"
_NEVER_SENT = 77
"""The tag of a message that no rank sends."""
_ALONG = {**{axis: axis for axis in AXES}, FORWARD: "pp", BACKWARD: "pp"}


@dataclass(frozen=True)
class Ranks:
    """Where this process stands. `axes` holds dp, pp, tp and the two pipeline channels; `among` those pipeline ranks of
    its own pp axis that exchange something, where it is one of them; `owns_world` says that launch initialised
    torch.distributed and close must end it."""

    rank: int
    mesh: Mesh
    device: torch.device
    axes: Mapping[str, Axis]
    world: Axis
    owns_world: bool = False
    owned: tuple[dist.ProcessGroup, ...] = field(default=(), repr=False)
    among: Mapping[tuple[int, ...], Axis] = field(default_factory=dict)

    @property
    def at(self) -> Coordinate:
        return self.mesh.coordinate(self.rank)

    @property
    def place(self) -> str:
        """`rank 3 (dp 0, pp 1, tp 1)`, for messages."""
        at = self.at
        return f"rank {self.rank} (dp {at.dp}, pp {at.pp}, tp {at.tp})"

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can hold what this rank, on a GPU, sends."""
        return self.world.group is None or over_nccl(self.world, self.device)

    def sum(self, numbers: Sequence[float], axis: Axis | None = None) -> list[float]:
        """The sums of the numbers over the ranks of the axis (default: all ranks), equal on each of them."""
        axis = axis or self.world
        if axis.group is None:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=control_device(axis.group, self.device))
        with waits.waiting():
            dist.all_reduce(total, group=axis.group)
        return [float(number) for number in total.tolist()]

    def gather(self, thing: Any, axis: Axis | None = None) -> list[Any]:
        """The small Python object of every rank of the axis (default: all ranks), in order."""
        axis = axis or self.world
        if axis.group is None:
            return [thing]
        everyone: list[Any] = [None] * axis.size
        dist.all_gather_object(everyone, thing, group=axis.group)
        return everyone

    def broadcast(self, x: Tensor, axis: Axis, index: int) -> None:
        """Overwrite x on every rank of the axis with that of the rank at `index`."""
        if axis.group is not None and x.numel():
            dist.broadcast(x, src=axis.ranks[index], group=axis.group)

    def agree(self, problem: Exception | None, numbers: Sequence[float] = ()) -> list[float]:
        """Raise on every rank if any has a problem; otherwise the sums of `numbers` over all ranks.

        One small all-reduce when all is well.
        """
        failed, *sums = self.sum([float(problem is not None), *numbers])
        if not failed:
            return sums
        found = [(rank, other) for rank, other in enumerate(self.gather(_portable(problem))) if other is not None]
        rank, first = found[0]
        vars(first)[_AGREED] = True
        if len(self.world.ranks) > 1 and isinstance(first, SnnpartError):
            first.where = ", ".join(filter(None, [f"rank {rank}", first.where]))
        elif len(self.world.ranks) > 1:
            first.add_note(f"on rank {rank}")
        raise first from (problem if problem is not first else None)

    def hang_up(self) -> None:
        """Whoever waits in one of this program's groups over gloo, here or on another rank, gets an error at once. The
        groups are of no use afterwards. From any thread.

        A receive that nobody answers and that may take a millisecond: gloo then closes the connections of its group.
        """
        for group in self.owned:
            other = next(rank for rank in dist.get_process_group_ranks(group) if rank != self.rank)
            if "gloo" in str(dist.get_backend_config(group)):
                with suppress(RuntimeError):
                    nothing = dist.irecv(torch.empty(1), other, group=group, tag=_NEVER_SENT)
                    assert nothing is not None
                    nothing.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """Give the process groups back."""
        for group in self.owned:
            dist.destroy_process_group(group)
        if self.owns_world and dist.is_initialized():
            dist.destroy_process_group()


def join(pp: int, tp: int, *, device: torch.device, timeout: timedelta, among: Iterable[tuple[int, ...]] = ()) -> Ranks:
    """Take this process's place: initialise torch.distributed from torchrun's environment if nobody has, make groups.

    Without torchrun and without a process group this is the only rank. Collective: every rank must call it. All groups
    are of this program alone, that of all ranks too: they can be broken off (`Ranks.hang_up`).
    `among`: sets of pipeline ranks that want a group.

    Raises:
        ConfigError: pp * tp does not divide the number of ranks.
        LaunchError: the device is not there.
    """
    device = usable_device(device)
    owns_world = not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if owns_world:
        _begin_world(device, timeout)
    try:
        return _placed(pp, tp, device, timeout, sorted(set(among)), owns_world)
    except BaseException:
        if owns_world:  # the next launch begins anew
            dist.destroy_process_group()
        raise


def _placed(
    pp: int, tp: int, device: torch.device, timeout: timedelta, among: Sequence[tuple[int, ...]], owns_world: bool
) -> Ranks:
    """The groups of this process's place."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = mesh_for(size, pp=pp, tp=tp)
    everyone = cast("dist.ProcessGroup", dist.new_group(timeout=timeout)) if size > 1 else None
    axes = {name: _axis(mesh, rank, along, timeout) for name, along in _ALONG.items()}
    world = Axis(everyone, rank, tuple(range(size)))
    groups = {at: _axis(mesh, rank, "pp", timeout, at) for at in among}
    owned = tuple(axis.group for axis in (world, *axes.values(), *groups.values()) if axis.group is not None)
    return Ranks(rank, mesh, device, axes, world, owns_world, owned, groups)


def _begin_world(device: torch.device, timeout: timedelta) -> None:
    """The default process group, from torchrun's environment. A process may end it and begin another, and torchrun may
    start the ranks again over the same store: each group has keys of its own there, where the addresses of the ones
    before still stand."""
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # its watchdog would break a capture
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"snnpart/{attempt}/{size}/{next(_worlds)}", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )


def is_agreed(error: Exception) -> bool:
    """Whether `Ranks.agree` raised the error, which then is every rank's."""
    return _AGREED in vars(error)


def _portable(problem: Exception | None) -> Exception | None:
    """The error itself where it can be sent to other ranks, else its text."""
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:
        return RuntimeError(f"{type(problem).__name__}: {problem}")
    return problem


def usable_device(device: torch.device) -> torch.device:
    """The device with its index (torchrun's LOCAL_RANK for CUDA); LaunchError when this machine does not have it."""
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise LaunchError(
            f"device cuda:{index} was asked for, but this process sees {count} CUDA devices",
            fix="launch with device='cpu', or start at most one process per GPU with a CUDA build of torch",
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _axis(mesh: Mesh, rank: int, along: str, timeout: timedelta, at: tuple[int, ...] = ()) -> Axis:
    """The group of this rank along a mesh axis, or of the ranks that stand `at` these places of it (for another rank
    only this one). torch wants every rank to make every group, in one order."""
    own, group = mesh.group(along, rank), None
    places = at or tuple(range(len(own)))
    for line in sorted({mesh.group(along, other) for other in range(mesh.size)}) if len(places) > 1 else ():
        made = dist.new_group([line[place] for place in places], timeout=timeout)
        if line == own and isinstance(made, dist.ProcessGroup):
            group = made
    chosen = tuple(own[place] for place in places)
    return Axis(group, chosen.index(rank), chosen) if rank in chosen else Axis(None, 0, (rank,))


def control_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where small control tensors live: on the CPU where the group can carry them, so that no GPU has to wait."""
    return torch.device("cpu") if "gloo" in str(dist.get_backend_config(group)) else device
