"""The way between local slices and the user's full tensors, under the user's own names.

A full tensor is put together in three steps: over dp (FSDP2's shards, which lie along dim 0; buffers are those of dp
rank 0), over tp (the pieces each rank holds), over pp (the owning stage gives it to the others). Every rank gets it,
on the CPU.

A buffer that holds neuron state has the value after a reset, and a loaded one is left out: it is of some window.

The state has the keys of the user's `state_dict()`, aliases of tied tensors and unused tensors included, and besides
the learned tensors that the user did not register (fields of a NamedTuple): leaving them out would lose training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from snnpart import ops
from snnpart.errors import CheckpointError
from snnpart.facts import Pieces
from snnpart.graph import TensorInfo
from snnpart.program import CompiledProgram, TensorSlice
from snnpart.runtime.collectives import gather_over
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.stage import Stage


class FullState:
    """Full tensors of a running program. All methods that move tensors are collective."""

    def __init__(self, compiled: CompiledProgram, stage: Stage, ranks: Ranks, values: Mapping[str, Tensor]) -> None:
        self._windows = compiled.source.window_buffers()
        self._infos, self._stage, self._ranks = compiled.source.tensors, stage, ranks
        self._parts: dict[str, dict[int, TensorSlice]] = {}
        self._owner: dict[str, int] = {}
        for (index, tp_rank), program in compiled.stages.items():
            for part in program.tensors:
                self._owner.setdefault(part.name, compiled.plan.rank_of(index))
                self._parts.setdefault(part.name, {})[tp_rank] = part
        nowhere = set(self._infos) - set(self._owner)
        self._idle = {name: values[name].detach().cpu().clone() for name in self._infos if name in nowhere}

    @property
    def idle(self) -> Mapping[str, Tensor]:
        """The stored tensors that no stage uses, by the user's names."""
        return {name: tensor for name, tensor in self._idle.items() if _is_state(self._infos[name])}

    def stores(self, name: str) -> bool:
        """Whether the user's `state_dict()` holds the tensor, or training changes it."""
        return name in self._infos and _is_state(self._infos[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Full tensors on the CPU under the keys of the user's state_dict."""
        names = [name for name, info in self._infos.items() if _is_state(info)]
        full = self.gather(names, self._stage.tensor)
        return {key: full[name] for name in names for key in self._infos[name].keys}

    def gather(self, names: Iterable[str], local: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The full tensors of these names; `local` gives this stage's part of one."""
        return {name: self._idle[name].clone() if name in self._idle else self._full(name, local) for name in names}

    def gradients(self) -> dict[str, Tensor]:
        """The full gradients of the parameters that have one."""
        held = {name: p.grad for name, p in self._stage.parameters() if p.grad is not None}
        present = {name for names in self._ranks.gather(sorted(held), self._ranks.axes["pp"]) for name in names}
        return self.gather([name for name in self._infos if name in present], lambda name: held[name])

    def _full(self, name: str, local: Callable[[str], Tensor]) -> Tensor:
        parts, ranks = self._parts[name], self._ranks
        axis, owner = ranks.axes["pp"], self._owner[name]
        if axis.index == owner:
            whole = self._over_dp_and_tp(parts, local(name).detach())
        else:
            whole = torch.empty(parts[0].global_shape, dtype=parts[0].dtype, device=ranks.device)
        ranks.broadcast(whole, axis, owner)
        return whole.cpu()

    def _over_dp_and_tp(self, parts: Mapping[int, TensorSlice], local: Tensor) -> Tensor:
        part, ranks = parts[0], self._ranks
        if isinstance(local, DTensor):
            local = gather_over(local.to_local(), ranks.axes["dp"], 0, _dp_pieces(local, ranks))
        elif part.kind != "parameter":
            local = local.clone()
            ranks.broadcast(local, ranks.axes["dp"], 0)
        if part.dim is None:
            return local.clone(memory_format=torch.contiguous_format)
        whole = gather_over(local, ranks.axes["tp"], part.dim, [parts[r].pieces for r in sorted(parts)])
        return whole.clone(memory_format=torch.contiguous_format)  # other stages receive it so

    def load(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take each rank's slices from full tensors.

        Raises:
            CheckpointError: on every rank, when keys are missing or unexpected (strict) or a shape is another. Nothing
                is changed then.
        """
        self._ranks.agree(self._problem(state, strict))
        with torch.no_grad():
            for name, info in self._infos.items():
                key = next((key for key in info.keys if key in state), None)
                if key is not None and _is_state(info) and name not in self._windows:
                    self._put(name, state[key])

    def _problem(self, state: Mapping[str, Any], strict: bool) -> CheckpointError | None:
        known = {key: info for info in self._infos.values() if _is_state(info) for key in info.keys}
        unexpected = sorted(set(state) - set(known))
        missing = [i.name for i in known.values() if state.keys().isdisjoint(i.keys)]
        if strict and (missing or unexpected):
            return CheckpointError(
                f"missing keys {missing[:5]}, unexpected keys {unexpected[:5]}",
                fix="load a state_dict() of the same network, or pass strict=False",
            )
        for key, info in known.items():
            loaded = key in state and info.name not in self._windows
            if loaded and tuple(state[key].shape) != tuple(info.tensor.shape):
                return CheckpointError(
                    f"'{key}' has shape {tuple(state[key].shape)} there and {tuple(info.tensor.shape)} in the network"
                )
        return None

    def _put(self, name: str, whole: Tensor) -> None:
        if name in self._idle:
            self._idle[name].copy_(whole)
        elif name in self._stage.slices:
            part, target = self._stage.slices[name], self._stage.tensor(name)
            cut = whole if part.dim is None else ops.select_pieces(whole, part.dim, part.pieces)
            local = cut.detach().to(target.device, target.dtype)
            if isinstance(target, DTensor):
                own = _dp_pieces(target, self._ranks)[self._ranks.at.dp]
                target.to_local().copy_(ops.select_pieces(local, 0, own))
            else:
                target.copy_(local)


def dp_rows(x: DTensor, ranks: Ranks) -> tuple[int, int]:
    """The rows of dim 0 that this rank holds of a tensor that FSDP2 has sharded."""
    ((first, last),) = _dp_pieces(x, ranks)[ranks.at.dp]
    return first, last


def _dp_pieces(x: DTensor, ranks: Ranks) -> list[Pieces]:
    """What each dp rank holds of dim 0 of a tensor that FSDP2 has sharded: equal chunks, the last ones shorter."""
    length = x.shape[0]
    chunk = -(-length // ranks.mesh.dp)
    return [((min(r * chunk, length), min((r + 1) * chunk, length)),) for r in range(ranks.mesh.dp)]


def _is_state(info: TensorInfo) -> bool:
    if not info.registered:
        return info.tensor.requires_grad
    return info.kind == "parameter" or (info.kind == "buffer" and info.persistent)
