"""check_running: a launched program computes, on its real ranks, what the simulation of its ranks computes.

The simulation was compared with the module when the program was compiled; this comparison covers what only exists
after launch: process groups, messages, slices of the weights, gradient reduction. It costs one step on a few samples,
the same on all ranks, and leaves no trace. A network that draws random numbers is compared in eval mode, where it
draws none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from snnpart import simulate
from snnpart.effects import is_random
from snnpart.errors import VerifyError
from snnpart.gate.check import listed
from snnpart.gate.compare import Mismatch, compare
from snnpart.gate.observe import Observed, cotangent
from snnpart.gate.rounding import whole_float32
from snnpart.graph import SpikeGraph
from snnpart.program import CompiledProgram


class Running(Protocol):
    """What the comparison needs of a launched program; `RunningProgram` is one."""

    @property
    def compiled(self) -> CompiledProgram: ...
    @property
    def ranks(self) -> Any: ...
    def train(self, mode: bool = True) -> Any: ...
    def train_step(self, inputs: Any, targets: Any, loss_fn: Callable[..., Tensor]) -> Tensor: ...
    def gradients(self) -> dict[str, Tensor]: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def notice(self, text: str) -> None: ...
    def preserved(self) -> AbstractContextManager[None]: ...


SAMPLES = 2
"""Samples a microbatch: BatchNorm in training mode needs more than one."""
NOISE = 10.0
"""A difference within this many times what rounding of the inputs alone does to the network is rounding."""


def check_running(running: Running, inputs: Any) -> None:
    """Compare one step of the launched program with its simulation, on the first samples of rank 0's `inputs`.

    Collective: every rank calls it. Buffers, gradients, mode and random numbers are as before. Rank 0 simulates.

    Raises:
        VerifyError: on every rank; it names the gradient, buffer or loss that differs.
    """
    compiled = running.compiled
    training = compiled.source.traced_training and not _draws(compiled.source)
    if compiled.source.training_specialised and training != compiled.source.traced_training:
        running.notice("not checked at launch: the network draws random numbers and branches on its mode")
        return
    count = _count(compiled)
    if count is None:
        running.notice("not checked at launch: the network compares the batch size, and microbatches of it differ")
        return
    few = running.ranks.gather(_few(compiled, inputs, count) if running.ranks.rank == 0 else None)[0]
    values = running.state_dict()
    with whole_float32() if running.ranks.device.type == "cuda" else nullcontext():
        got = _observe_running(running, few, training)
    with torch.random.fork_rng([]):
        problem = _problem(running, few, values, training, got) if running.ranks.rank == 0 else None
    running.ranks.agree(problem)


def _problem(
    running: Running, inputs: Any, values: Mapping[str, Tensor], training: bool, got: Observed
) -> VerifyError | None:
    compiled = running.compiled
    want = _observe_simulation(compiled, inputs, values, training)
    _, wrong = compare(want, got)
    if not wrong or _is_rounding(compiled, inputs, values, training, want, wrong):
        return None
    return VerifyError(
        f"the launched program differs from its simulation: {listed(wrong)}",
        fix="launch with verify=False to go on without this comparison, and report it with the model",
    )


def _draws(source: SpikeGraph) -> bool:
    """Whether a step draws random numbers; a leaf that is no neuron may (a dropout with one mask a window)."""
    return any(is_random(node) for node in source.graph.nodes) or not all(
        leaf.neuron for leaf in source.leaves.values()
    )


def _count(compiled: CompiledProgram) -> int | None:
    """How many samples are enough for every microbatch; None where the graph holds for no microbatch of a few."""
    source, parts = compiled.source, compiled.plan.microbatches
    few = source.batch if source.batch_fixed else min(source.batch, SAMPLES * parts)
    counts = (few, source.batch)
    return next((n for n in counts if not any(source.broken_at(size) for size in _part_sizes(n, parts))), None)


def _few(compiled: CompiledProgram, inputs: Any, count: int) -> Any:
    """The first samples of the inputs on the CPU."""
    leaves, spec = pytree.tree_flatten(inputs)
    infos = iter(compiled.source.inputs)
    few = [_first(leaf, next(infos).batch_dim, count) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(few, spec)


def _first(x: Tensor, dim: int | None, count: int) -> Tensor:
    x = x.detach().cpu()
    return x.clone() if dim is None else x.narrow(dim, 0, count).clone()


def _observe_running(running: Running, inputs: Any, training: bool) -> Observed:
    targets = torch.zeros(_sizes(running.compiled, inputs)[0])
    with running.preserved():
        running.train(training)
        loss = running.train_step(inputs, targets, lambda outputs, _: _loss(pytree.tree_leaves(outputs)))
        gradients: dict[str, Tensor | None] = {name: grad.cpu() for name, grad in running.gradients().items()}
        buffers = {name: value for name, value in running.state_dict().items() if name in _buffers(running.compiled)}
    return Observed(outputs=[loss.cpu()], gradients=gradients, buffers=buffers)


def _observe_simulation(
    compiled: CompiledProgram, inputs: Any, values: Mapping[str, Tensor], training: bool
) -> Observed:
    tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    parts = compiled.plan.microbatches
    batch, sizes = _sizes(compiled, inputs)
    with torch.enable_grad():
        run = simulate.run(compiled, tensors, values=values, training=training, microbatches=parts)
        cut = zip(
            *(_cut(x, info.batch_dim, sizes) for x, info in zip(run.outputs, compiled.source.outputs, strict=True))
        )
        loss = torch.stack([_loss(part) * (size / batch) for part, size in zip(cut, sizes, strict=True)]).sum()
        if loss.requires_grad:
            loss.backward()
    gradients: dict[str, Tensor | None] = {n: grad for n, grad in run.gradients().items() if grad is not None}
    buffers = {name: value for name, value in run.buffers().items() if name in _buffers(compiled)}
    return Observed(outputs=[loss.detach().double()], gradients=gradients, buffers=buffers)


def _buffers(compiled: CompiledProgram) -> set[str]:
    """The buffers that both sides report: those that are not neuron state."""
    infos = compiled.source.tensors.values()
    stored = {info.name for info in infos if info.kind == "buffer" and info.persistent and info.leaf is None}
    return stored - compiled.source.window_buffers()


def _sizes(compiled: CompiledProgram, inputs: Any) -> tuple[int, list[int]]:
    """The batch size and the sizes of its microbatches, which differ by one at most."""
    tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    known = [
        x.shape[i.batch_dim] for x, i in zip(tensors, compiled.source.inputs, strict=True) if i.batch_dim is not None
    ]
    batch = known[0] if known else 1
    return batch, _part_sizes(batch, compiled.plan.microbatches)


def _part_sizes(batch: int, parts: int) -> list[int]:
    return [batch // parts + (i < batch % parts) for i in range(parts)]


def _cut(x: Tensor, dim: int | None, sizes: list[int]) -> list[Tensor]:
    return list(x.split(sizes, dim)) if dim is not None else [x] * len(sizes)


def _loss(outputs: Any) -> Tensor:
    """A fixed random number for every output, so that every gradient is tested."""
    real = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
    return torch.stack([(cotangent(x, at) * x).sum() for at, x in enumerate(real)]).sum()


def _is_rounding(
    compiled: CompiledProgram,
    inputs: Any,
    values: Mapping[str, Tensor],
    training: bool,
    want: Observed,
    wrong: list[Mismatch],
) -> bool:
    """Whether inputs that differ by rounding move the network as far: then a spike sits at its threshold."""
    kinds = [x.dtype for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor) and x.is_floating_point()]
    if not kinds or torch.float64 in kinds:
        return False
    moved, _ = compare(want, _observe_simulation(compiled, _rounded(inputs), values, training))
    allowed = {"output": moved.output, "gradient": moved.gradient, "buffer": moved.buffer}
    return all(mismatch.difference <= NOISE * allowed[mismatch.kind] for mismatch in wrong)


def _rounded(inputs: Any) -> Any:
    """The inputs, each number moved by about one unit in the last place."""
    generator = torch.Generator().manual_seed(0)

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        noise = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (x.double() * (1 + noise * torch.finfo(x.dtype).eps)).to(x.dtype)

    return pytree.tree_map(move, inputs)
