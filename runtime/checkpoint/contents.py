"""What of a running program goes into a checkpoint, under which name, and which rank writes which chunks of it.

    model.NAME                 parameters and persistent buffers under the user's names, tied ones once
    optimizer.NAME.KEY         the optimizer's state of parameter NAME: of its shape and cut as it is, or one number
    MIRROR.NAME                tensors kept beside the parameters and cut like them (an average of the weights)

Every number is written by exactly one rank: replicated tensors by the first rank of the axes that replicate them, a
parameter of which several stages hold a copy by the first of these. What
neurons remember between steps is not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from snnpart.errors import CheckpointError
from snnpart.program import TensorSlice
from snnpart.runtime.checkpoint.chunks import Chunk, Chunked, chunks_of
from snnpart.runtime.running import RunningProgram
from snnpart.runtime.state import dp_rows

MODEL, OPTIMIZER = "model", "optimizer"
Mirrors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Entry:
    """A tensor as a checkpoint names it: the whole's shape, and this rank's chunks of it (views)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    writes: bool

    def chunked(self, copy: bool = False) -> Chunked:
        """The form torch.distributed.checkpoint takes; `copy` puts the numbers aside, on the CPU."""
        chunks = self.chunks
        if copy:
            chunks = tuple(Chunk(c.offsets, c.data.detach().to("cpu", copy=True).contiguous()) for c in chunks)
        return Chunked(self.shape, self.dtype, chunks)


class Contents:
    """The entries of a running program."""

    def __init__(self, running: RunningProgram, mirrors: Mirrors) -> None:
        self._running, self._mirrors = running, mirrors

    def entries(self) -> Iterator[Entry]:
        """All tensors that this rank holds."""
        yield from self.model()
        yield from self.optimizer_state()
        for mirror, tensors in self._mirrors.items():
            for name, local in tensors.items():
                yield self._cut(f"{mirror}.{name}", self._slice(name), local, self._parameter(name))

    def model(self) -> Iterator[Entry]:
        """Parameters and buffers, those that no rank uses included."""
        stage, full = self._running.stage, self._running.full_state
        for name in stage.slices:
            if full.stores(name):
                tensor = stage.tensor(name)
                yield self._cut(f"{MODEL}.{name}", self._slice(name), local_of(tensor), tensor)
        for name, tensor in full.idle.items():
            first = self._running.ranks.rank == 0
            yield Entry(f"{MODEL}.{name}", tuple(tensor.shape), tensor.dtype, chunks_of(tensor, None, ()), first)

    def optimizer_state(self) -> Iterator[Entry]:
        """The optimizer's tensors of every parameter of this rank."""
        if self._running.optimizer is None:
            return
        for name, parameter in self._running.named_parameters():
            for key, value in self._running.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield self._optimizer_entry(name, key, value, parameter)

    def _optimizer_entry(self, name: str, key: str, value: Tensor, parameter: nn.Parameter) -> Entry:
        local, full = local_of(value), f"{OPTIMIZER}.{name}.{key}"
        if local.shape == local_of(parameter).shape and local.dim():
            return self._cut(full, self._slice(name), local, parameter)
        if local.numel() != 1:
            raise CheckpointError(
                f"the optimizer's '{key}' of '{name}' has shape {tuple(local.shape)}, the parameter "
                f"{tuple(parameter.shape)}: it cannot be cut for another topology",
                fix="use an optimizer whose state has the shape of its parameters, as AdamW's and SGD's",
            )
        return Entry(full, tuple(local.shape), local.dtype, chunks_of(local, None, ()), self._first(name))

    def _slice(self, name: str) -> TensorSlice:
        return self._running.stage.slices[name]

    def _parameter(self, name: str) -> Tensor:
        return dict(self._running.named_parameters())[name]

    def _cut(self, full: str, part: TensorSlice, local: Tensor, held: Tensor) -> Entry:
        """The chunks of what lies on this rank as `held` does."""
        at = self._running.ranks.at
        rows = dp_rows(held, self._running.ranks) if isinstance(held, DTensor) else None
        writes = (rows is not None or at.dp == 0) and (part.dim is not None or at.tp == 0)
        writes = writes and self._running.stage.stands_for(part.name)
        return Entry(full, part.global_shape, local.dtype, chunks_of(local, part.dim, part.pieces, rows), writes)

    def _first(self, name: str) -> bool:
        at = self._running.ranks.at
        return at.dp == 0 and at.tp == 0 and self._running.stage.stands_for(name)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's numbers of a tensor that FSDP2 may have cut."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def prepare_optimizer(running: RunningProgram, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Give a fresh optimizer the state tensors that a checkpoint has numbers for; `stored` are its names and shapes.

    The optimizer's own `load_state_dict` decides on which device and in which dtype they live.
    """
    optimizer = running.optimizer
    if optimizer is None:
        return
    names = {id(parameter): name for name, parameter in running.named_parameters()}
    state, index = {}, 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            made = _empty_state(names[id(parameter)], parameter, stored)
            if made:
                state[index] = made
            index += 1
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _empty_state(name: str, parameter: Tensor, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    prefix = f"{OPTIMIZER}.{name}."
    keys = [full.removeprefix(prefix) for full in stored if full.startswith(prefix)]
    return {key: _empty(parameter, stored[prefix + key]) for key in keys if "." not in key}


def _empty(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32) if len(shape) < parameter.dim() else torch.zeros_like(parameter)
