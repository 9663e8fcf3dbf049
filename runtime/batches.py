"""A rank's batch as the microbatches of a pass: cut, checked, agreed with the other ranks, and their graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from snnpart import ops
from snnpart.effects import writes_buffer
from snnpart.errors import ConfigError
from snnpart.ops_time import Loop
from snnpart.program import CompiledProgram
from snnpart.runtime import microbatch
from snnpart.runtime.carry import Carry
from snnpart.runtime.losses import MEAN, Reduction
from snnpart.runtime.pipeline import Part
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.settings import Settings
from snnpart.runtime.signatures import Signatures
from snnpart.runtime.stage import BoundStage, written


class Batches:
    """Cuts batches for one launched program. `carry` holds the state that microbatches start from; None: from reset."""

    def __init__(
        self, compiled: CompiledProgram, ranks: Ranks, signatures: Signatures, carry: Carry | None, settings: Settings
    ) -> None:
        self._compiled, self._ranks, self._signatures = compiled, ranks, signatures
        self._carry, self._settings = carry, settings

    def cut(
        self,
        inputs: Any,
        targets: Any,
        training: bool,
        reset_mask: Tensor | None = None,
        reduction: Reduction = MEAN,
    ) -> tuple[list[Part], float]:
        """This rank's microbatches, agreed with the others, and this dp rank's share of all samples."""
        problem: Exception | None = None
        parts: list[Part] = []
        weights: list[float] = []
        try:
            parts = self.parts(inputs, targets, training, reset_mask, check=self._settings.check_inputs)
            weights = [reduction.weight(part.size, part.targets) for part in parts]
        except Exception as error:  # the user's own too: what stops one rank must stop all before they communicate
            problem = error
        size = sum(part.size for part in parts)
        factors, total, _ = self.agree(problem, size, weights, reduction)
        self._fetch(parts)
        return [part.weighing(factor) for part, factor in zip(parts, factors, strict=True)], size / total

    def _fetch(self, parts: Sequence[Part]) -> None:
        """State that another pipeline rank kept than reads it: everyone is given it. Collective over pp."""
        for part in parts:
            for position, owner in next(iter(part.bound.values())).moved:
                held = part.inputs[position].contiguous()
                self._ranks.broadcast(held, self._ranks.axes["pp"], owner)
                part.inputs[position] = held

    def weights(self, sizes: Sequence[int], targets: Any, reduction: Reduction) -> list[float]:
        """How much each microbatch counts; `targets` are the whole batch's, wherever they are."""
        if reduction.weigh is None:
            return [reduction.weight(size, None) for size in sizes]
        goals = microbatch.split_nested(targets, self._settings.target_dim, sizes)
        return [reduction.weight(size, goal) for size, goal in zip(sizes, goals, strict=True)]

    def agree(
        self,
        problem: Exception | None,
        size: int,
        weights: Sequence[float],
        reduction: Reduction,
        counts: Sequence[float] = (),
    ) -> tuple[list[float], float, list[float]]:
        """What each microbatch's loss is multiplied by, the samples of all dp ranks, and sums of `counts` over ranks.

        Raises:
            Exception: on every rank the first rank's problem; ConfigError when ranks of one dp coordinate differ.
        """
        dp = self._ranks.mesh.dp
        mine = [float(size * (copy == self._ranks.at.dp)) for copy in range(dp)]
        weighs = sum(weights) if self._ranks.at.pp == 0 and self._ranks.at.tp == 0 else 0.0
        everyone, *sums = self._ranks.agree(problem, [weighs, *mine, *(number**2 for number in mine), *counts])
        copies = self._ranks.mesh.pp * self._ranks.mesh.tp
        microbatch.check_same_batch(sums[:dp], sums[dp : 2 * dp], copies)
        if self._compiled.plan.dp == "fsdp2" and self._compiled.plan.reshard:
            microbatch.check_same_count([size / copies for size in sums[:dp]], self._compiled.plan.microbatches)
        factors = [reduction.factor(weight, everyone, dp) for weight in weights]
        return factors, sum(sums[:dp]) / copies, sums[2 * dp :]

    def parts(
        self, inputs: Any, targets: Any, training: bool, reset_mask: Tensor | None = None, *, check: bool = False
    ) -> list[Part]:
        """This rank's microbatches, with weight 1; `check` looks for NaN and Inf in the inputs."""
        infos = self._compiled.source.inputs
        tensors = [x.to(self._ranks.device) for x in microbatch.tensors_of(inputs, infos)]
        if check:
            self.check(tensors)
        batch, count = microbatch.batch_size(tensors, infos), self._compiled.plan.microbatches
        sizes = microbatch.part_sizes(batch, min(count, max(batch, 1)))
        cut = [microbatch.split(x, info.batch_dim, sizes) for info, x in zip(infos, tensors, strict=True)]
        goals = microbatch.split_nested(on_device(targets, self._ranks.device), self._settings.target_dim, sizes)
        self._prepare_state(sizes, reset_mask)
        parts = []
        for i, (size, goal) in enumerate(zip(sizes, goals, strict=True)):
            bound, mine = self._graphs(inputs, [pieces[i] for pieces in cut], training, i)
            parts.append(Part(size, 1.0, bound, mine, goal, i))
        return parts

    def check(self, inputs: Any) -> None:
        """ConfigError when inputs hold NaN or Inf. The host waits for them."""
        infos = self._compiled.source.inputs
        microbatch.check_finite(microbatch.tensors_of(inputs, infos), [info.name for info in infos])

    def _prepare_state(self, sizes: Sequence[int], reset_mask: Tensor | None) -> None:
        """State that is carried must be of a batch cut alike; samples of the mask start anew."""
        if reset_mask is not None and not self._settings.carry:
            raise ConfigError("reset_mask= needs a program whose state is carried", fix='compile with state="carry"')
        if self._carry is not None:
            self._carry.expect(sizes)
            if reset_mask is not None:
                self._carry.restart(reset_mask)

    def _graphs(
        self, inputs: Any, tensors: list[Tensor], training: bool, number: int
    ) -> tuple[Mapping[int, BoundStage], list[Tensor]]:
        """The graphs of a microbatch, and what goes in: its tensors, and the hand-written state it left."""
        if self._carry is None or self._carry.carrier is None:
            return self._signatures.bound(inputs, tensors, training), tensors
        states = self._carry.slots(number)
        bound = self._signatures.carrying(inputs, tensors, states, training, self._carry.carrier)
        return bound, [*tensors, *states]


def on_device(data: Any, device: torch.device) -> Any:
    """The nested data with its tensors on the device."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, data)


def read_buffers(parts: Sequence[Part], training: bool) -> frozenset[str]:
    """The buffers that a train step computes with, by the user's names.

    BatchNorm in training mode only writes its running statistics: those of other dp ranks are dp rank 0's when they are
    read, in an evaluation or a state.
    """
    found: set[str] = set()
    for bound in _stages(parts):
        for node in bound.program.graph.nodes:
            if node.op == "get_attr" and any(not training or not _only_writes(user, node) for user in node.users):
                found.add(str(node.target))
        found |= _inside_leaves(bound)
    return frozenset(found)


def written_buffers(parts: Sequence[Part]) -> frozenset[str]:
    """The buffers that a train step may write, by the user's names: all that leaves hold, as nobody sees into them."""
    return frozenset(name for bound in _stages(parts) for name in written(bound.program.graph) | _inside_leaves(bound))


def _stages(parts: Sequence[Part]) -> list[BoundStage]:
    return list({id(stage): stage for part in parts for stage in part.bound.values()}.values())


def _inside_leaves(bound: BoundStage) -> set[str]:
    return {part.name for part in bound.program.tensors if part.leaf is not None}


def _only_writes(user: fx.Node, buffer: fx.Node) -> bool:
    """Whether a BatchNorm takes the buffer as a running statistic."""
    tracks = writes_buffer(user) and user.target is not ops.assign and not isinstance(user.target, Loop)
    return tracks and buffer in user.args[3:6] and buffer not in (*user.args[:3], *user.args[6:])
