"""Runs a compiled program, all its ranks, in this process: what every rank would compute, and a check of all ranks.

`run` is numerics: stages one after the other, the tp ranks of a stage in lockstep (`lockstep`), each microbatch from
reset state, in order, so that BatchNorm's running statistics are those of gradient accumulation. The whole thing is one
autograd graph; gradients are put together under the user's names and shapes.

`dry_run` needs no numbers and is cheap enough for every compilation (`dryrun`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from snnpart import frameworks, hooks, ops
from snnpart.dryrun import DryRun, dry_run
from snnpart.errors import ConfigError, VerifyError
from snnpart.graph import BATCH_SIZE, Body, SpikeGraph
from snnpart.lockstep import join, one_of_all, run_stage
from snnpart.program import CompiledProgram, StageProgram, TensorSlice

__all__ = ["DryRun", "SimulatedRun", "dry_run", "run"]


@dataclass(frozen=True)
class _Rank:
    """What one (stage, tp rank) owns: its program, its body, and its tensors by the user's names."""

    program: StageProgram
    body: Body
    tensors: Mapping[str, Tensor]

    def reset(self) -> None:
        for path in self.program.leaves:
            for module in self.body.get_submodule(path).modules():
                frameworks.adapter_for(module).reset(module)

    def set_batch(self, size: int, example: int) -> None:
        for path, info in self.program.leaves.items():
            frameworks.fit(self.body.get_submodule(path), info.module, size, example)


@dataclass(frozen=True)
class SimulatedRun:
    """What the program computed. `outputs` are the flat outputs of the whole batch, with a gradient graph."""

    outputs: tuple[Tensor, ...]
    ranks: Mapping[tuple[int, int], _Rank]

    def gradients(self) -> dict[str, Tensor | None]:
        """After backward on the outputs: the gradient of every tensor that has one, in the user's names and shapes.

        Raises:
            VerifyError: ranks that hold the same tensor have different gradients.
        """
        learned = [parts for parts in self._by_name() if parts[0][0].requires_grad]
        largest = max((_peak(x.grad) for parts in learned for _, x in parts if x.grad is not None), default=0.0)
        found: dict[str, Tensor | None] = {}
        for parts in learned:
            name, grad = parts[0][0].name, _gathered_gradient(parts, largest)
            before = found.get(name)  # of another stage, which holds a copy
            found[name] = grad if before is None else before if grad is None else before + grad
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Every tensor that is no parameter, as it is after the run.

        Raises:
            VerifyError: ranks that hold the same buffer have different values.
        """
        return {parts[0][0].name: _gathered(parts) for parts in self._by_name() if not parts[0][0].requires_grad}

    def _by_name(self) -> Iterator[list[tuple[TensorSlice, Tensor]]]:
        """For each tensor the ranks' slices in tp order."""
        for (stage, tp_rank), rank in self.ranks.items():
            if tp_rank == 0:
                ranks = [r for (s, _), r in sorted(self.ranks.items(), key=lambda item: item[0]) if s == stage]
                for index, part in enumerate(rank.program.tensors):
                    yield [(r.program.tensors[index], r.tensors[part.name]) for r in ranks]


def run(
    compiled: CompiledProgram,
    inputs: Sequence[Tensor],
    *,
    values: Mapping[str, Tensor] | None = None,
    training: bool,
    microbatches: int = 1,
) -> SimulatedRun:
    """Run the program on one batch.

    Args:
        inputs: the tensor inputs in the order of `compiled.source.inputs`.
        values: the network's tensors by the user's names; those of the source where not given. They are copied.
        microbatches: how many parts the batch is cut into, sizes differing by one at most.

    Raises:
        ConfigError: fewer samples than microbatches.
    """
    held = {name: info.tensor for name, info in compiled.source.tensors.items()} | dict(values or {})
    ranks = {at: _make_rank(program, held, compiled.source) for at, program in compiled.stages.items()}
    sizes = _part_sizes(compiled.source, inputs, microbatches)
    parts = [
        x.split(sizes, info.batch_dim) if info.batch_dim is not None else [x] * len(sizes)
        for info, x in zip(compiled.source.inputs, inputs, strict=True)
    ]
    results = [_run_part(compiled, ranks, [part[i] for part in parts], size, training) for i, size in enumerate(sizes)]
    return SimulatedRun(_merge(results, compiled.source, sizes), ranks)


def _make_rank(program: StageProgram, values: Mapping[str, Tensor], source: SpikeGraph) -> _Rank:
    tensors = {part.name: _local(part, values[part.name]) for part in program.tensors}
    for part in program.tensors:
        if part.leaf is None:
            hooks.carry(source.tensors[part.name].tensor, tensors[part.name], part.dim, part.pieces)
    leaves: dict[str, nn.Module] = {}
    for path, info in program.leaves.items():
        leaves[path] = frameworks.clone_leaf(info.module, program.inside(path, tensors))
    own = {p.name: (_kind(p), tensors[p.name]) for p in program.tensors if p.leaf is None}
    return _Rank(program, Body(own, leaves), tensors)


def _local(part: TensorSlice, whole: Tensor) -> Tensor:
    cut = whole.detach() if part.dim is None else ops.select_pieces(whole.detach(), part.dim, part.pieces)
    local = cut.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(local, requires_grad=part.requires_grad) if _kind(part) == "parameter" else local


def _kind(part: TensorSlice) -> str:
    """Learned tensors that the user did not register are parameters here."""
    return "parameter" if part.requires_grad else part.kind


def _part_sizes(source: SpikeGraph, inputs: Sequence[Tensor], parts: int) -> list[int]:
    batched = [x.shape[info.batch_dim] for info, x in zip(source.inputs, inputs) if info.batch_dim is not None]
    batch = batched[0] if batched else 1
    if batch < parts:
        raise ConfigError(
            f"a batch of {batch} samples cannot be cut into {parts} microbatches",
            fix=f"give at least {parts} samples or at most {batch} microbatches",
        )
    return [batch // parts + (i < batch % parts) for i in range(parts)]


def _run_part(
    compiled: CompiledProgram,
    ranks: Mapping[tuple[int, int], _Rank],
    inputs: Sequence[Tensor],
    size: int,
    training: bool,
) -> list[Tensor]:
    """One microbatch through all stages; its flat outputs."""
    given = {info.name: x for info, x in zip(compiled.source.inputs, inputs)}
    received: list[tuple[Tensor, ...]] = [() for _ in range(compiled.plan.tp)]
    for stage in range(compiled.plan.stage_count):
        own = [ranks[stage, tp_rank] for tp_rank in range(compiled.plan.tp)]
        for rank in own:
            rank.reset()
            rank.set_batch(size, compiled.source.batch)
        arguments = [_arguments(rank.program, given, values, size) for rank, values in zip(own, received)]
        graphs = [rank.program.graph for rank in own]
        received = run_stage(graphs, [rank.body for rank in own], arguments, training=training)
        for rank in own:
            rank.reset()
    return [one_of_all(values) for values in zip(*received)]


def _arguments(
    program: StageProgram, given: Mapping[str, Tensor], received: Sequence[Tensor], size: int
) -> list[Tensor | int]:
    sized = any(node.op == "placeholder" and node.target == BATCH_SIZE for node in program.graph.nodes)
    return [*(given[name] for name in program.reads), *received, *([size] if sized else [])]


def _merge(results: Sequence[Sequence[Tensor]], source: SpikeGraph, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Outputs along their batch dim; one without is the mean over samples, or the first where it is no float."""
    if len(results) == 1:
        return tuple(results[0])
    merged = []
    for info, parts in zip(source.outputs, zip(*results)):
        if info.batch_dim is not None:
            merged.append(torch.cat(parts, info.batch_dim))
        elif parts[0].is_floating_point():
            merged.append(sum((part * (n / sum(sizes)) for part, n in zip(parts, sizes)), torch.zeros_like(parts[0])))
        else:
            merged.append(parts[0])
    return tuple(merged)


def _gathered(parts: Sequence[tuple[TensorSlice, Tensor]]) -> Tensor:
    slices, tensors = [part for part, _ in parts], [tensor.detach() for _, tensor in parts]
    if slices[0].dim is not None:
        return join(tensors, slices[0].dim, [part.pieces for part in slices])
    return _agreed(slices[0].name, "value", tensors)


def _gathered_gradient(parts: Sequence[tuple[TensorSlice, Tensor]], largest: float) -> Tensor | None:
    slices, tensors = [part for part, _ in parts], [tensor for _, tensor in parts]
    if all(tensor.grad is None for tensor in tensors):
        return None
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
    if slices[0].dim is not None:
        return join(grads, slices[0].dim, [part.pieces for part in slices])
    if slices[0].partial_gradient:
        return torch.stack(grads).sum(0)
    return _agreed(slices[0].name, "gradient", grads, largest)


def _peak(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _agreed(name: str, what: str, tensors: Sequence[Tensor], largest: float = 0.0) -> Tensor:
    """The tensor that all ranks hold alike (to rounding: a rank's own sums may be ordered otherwise).

    `largest` is the largest value of its kind, which the gradient of a bias in front of a BatchNorm, zero but for
    rounding, is measured by.
    """
    for rank, tensor in enumerate(tensors[1:], 1):
        scale = max(_peak(tensors[0]), largest, 1e-30)
        limit = 1e-9 if tensor.dtype == torch.float64 else 1e-4
        if tensor.numel() and float((tensor - tensors[0]).abs().max()) > limit * scale:
            raise VerifyError(
                f"tp rank {rank} has another {what} of '{name}' than tp rank 0, though both hold it whole",
                where=f"'{name}'",
                fix="report it with the model: a collective is missing",
            )
    return tensors[0]
