"""Compares a compiled network of the zoo with one process, or says how it was refused."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import effects, frameworks, parallelize, simulate
from snnpart.errors import SnnpartError
from snnpart.gate.draws import WithoutDraws
from snnpart.program import CompiledProgram
from tools.zoo.catalogue import Entry

TOPOLOGIES: tuple[tuple[int, int, int], ...] = tuple(
    (tp, pp, microbatches) for tp, pp in ((2, 1), (1, 2), (2, 2)) for microbatches in (1, 2)
)
"""(tp, pp, microbatches)."""
ROOT = Path(__file__).resolve().parents[2]
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


@dataclass(frozen=True)
class Outcome:
    """Equal to one process, refused by name, or wrong; `difference` is the largest one, relative to each kind's scale.

    `sharded` is the share of the parameters' elements that no rank holds whole.
    """

    verdict: str
    note: str = ""
    difference: float | None = None
    sharded: float | None = None
    seconds: float = 0.0


def check(entry: Entry, tp: int, pp: int, microbatches: int) -> Outcome:
    """Compile with all checks on, run all ranks in this process, compare output, loss, gradients and buffers."""
    started = time.perf_counter()
    module, inputs = entry.make()
    try:
        program = parallelize(
            module, example_inputs=inputs, tp=tp, pp=pp, microbatches=microbatches, verify="full", **entry.options
        )
        found = compare(entry, module, inputs, program.compiled, microbatches)
    except SnnpartError as error:
        return Outcome("refused", refusal(error), seconds=time.perf_counter() - started)
    except Exception as error:  # what is neither equal nor refused by name is a fault, and the table must show it
        text = str(error).strip().splitlines() or [""]
        return Outcome("error", f"{type(error).__name__}: {text[0]}", seconds=time.perf_counter() - started)
    worst = max(found, key=lambda name: found[name])
    verdict = "equal" if found[worst] <= TOLERANCES[entry.dtype] else "differs"
    note = "" if verdict == "equal" else f"{worst} by {found[worst]:.2g}"
    seconds = time.perf_counter() - started
    return Outcome(verdict, note, found[worst], sharded(program.compiled), seconds)


def refusal(error: SnnpartError) -> str:
    """The error's class and first line, paths from the repository's or the installed packages' root."""
    return relative(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def relative(text: str) -> str:
    return re.sub(r"/\S*/site-packages/", "", text.replace(f"{ROOT}/", ""))


def sharded(compiled: CompiledProgram) -> float | None:
    """The share of parameter elements that tp ranks hold in slices."""
    if compiled.plan.tp == 1:
        return None
    parts = [part for (_, rank), stage in compiled.stages.items() if rank == 0 for part in stage.tensors]
    sizes = {
        part.name: (compiled.source.tensors[part.name].tensor.numel(), part.dim is not None)
        for part in parts
        if part.requires_grad
    }
    return sum(n for n, cut in sizes.values() if cut) / max(1, sum(n for n, _ in sizes.values()))


@dataclass(frozen=True)
class Ran:
    """What a run gave: flat outputs, and tensors by name."""

    outputs: list[Tensor]
    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def compare(
    entry: Entry, module: nn.Module, inputs: tuple[Tensor, ...], compiled: CompiledProgram, microbatches: int
) -> dict[str, float]:
    """The difference of every output, gradient and buffer, and of the loss, relative to the scale of its kind."""
    random = any(effects.is_random(node) for node in compiled.source.graph.nodes)
    with WithoutDraws() if random else nullcontext(), torch.set_grad_enabled(entry.training):
        want = reference(entry, module, inputs, compiled, microbatches)
        got = simulated(entry, inputs, compiled, microbatches)
    size = torch.stack([x.detach().double().abs().sum() for x in want.outputs]).sum()  # a sum's rounding goes with it
    found = {"loss": float((want.loss - got.loss).detach().abs()) / max(float(size), 1e-12)}
    found |= differences("output", dict(enumerate(want.outputs)), dict(enumerate(got.outputs)))
    found |= differences("gradient", want.gradients, got.gradients)
    return found | differences("buffer", want.buffers, got.buffers)


def simulated(entry: Entry, inputs: tuple[Tensor, ...], compiled: CompiledProgram, microbatches: int) -> Ran:
    """All ranks of the compiled program, in this process."""
    run = simulate.run(compiled, inputs, training=entry.training, microbatches=microbatches)
    loss = loss_of(run.outputs)
    if entry.training:
        loss.backward()
    return Ran(list(run.outputs), loss, run.gradients(), run.buffers())


def reference(
    entry: Entry, module: nn.Module, inputs: tuple[Tensor, ...], compiled: CompiledProgram, microbatches: int
) -> Ran:
    """The module itself on the microbatches one after the other; it is left as it was.

    Not a copy: copying a module drops the hooks on its parameters. Buffers in which a framework's layers keep neuron
    state, and counters, are not compared; those of hand-written neurons are compared after the network's own reset.
    """
    dims = [info.batch_dim for info in compiled.source.outputs]
    with frameworks.preserved(module):
        module.zero_grad()
        parts = []
        for chunk in zip(*(x.chunk(microbatches, entry.in_dims) for x in inputs)):
            frameworks.reset_state(module)
            told(module, chunk[0].shape[entry.in_dims])
            parts.append([x for x in pytree.tree_leaves(entry.call(module, chunk)) if isinstance(x, Tensor)])
        outputs = [torch.cat(values, dim or 0) for values, dim in zip(zip(*parts), dims, strict=True)]
        loss = loss_of(outputs)
        if entry.training:
            loss.backward()
        gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        own_reset(module)
        held = compiled.source.tensors
        names = {name for name, info in held.items() if info.leaf is None} - framework_state(module)
        buffers = {
            name: buffer.detach().clone()
            for name, buffer in module.named_buffers()
            if name in names and buffer.is_floating_point()
        }
    if entry.training:
        assert max((float(grad.abs().max()) for grad in gradients.values()), default=0.0) > 1e-6, "no gradient flows"
    return Ran(outputs, loss, gradients, buffers)


def framework_state(model: nn.Module) -> set[str]:
    """Where the layers of frameworks keep state, those that are traced through too."""
    return {
        f"{path}.{name}".strip(".")
        for path, module in model.named_modules()
        for name in frameworks.adapter_for(module).state_names(module)
    }


def own_reset(module: nn.Module) -> None:
    """The network's own `reset()`, if it has one."""
    if callable(reset := getattr(module, "reset", None)):
        reset()


def differences(kind: str, want: Mapping[Any, Tensor | None], got: Mapping[Any, Tensor | None]) -> dict[str, float]:
    """max |a - b| over the largest value of the kind, by name."""
    present = {name: value.detach() for name, value in want.items() if value is not None}
    largest = max((float(value.abs().max()) for value in present.values() if value.numel()), default=0.0)
    found = {}
    for name, a in present.items():
        b = got.get(name)
        if b is None or a.shape != b.shape or a.dtype != b.dtype:
            found[f"{kind} {name}"] = float("inf")
        elif a.numel():
            found[f"{kind} {name}"] = float((a - b.detach()).abs().max()) / max(largest, 1e-12)
    return found


def loss_of(outputs: Any) -> Tensor:
    """Every output weighted with a wave."""
    waves = [
        (x, torch.sin(torch.arange(x.numel(), dtype=x.dtype)).view(x.shape)) for x in outputs if x.is_floating_point()
    ]
    return torch.stack([(x * wave).sum() for x, wave in waves]).sum()


def told(module: nn.Module, batch: int) -> nn.Module:
    """The module, its layers that have a batch size written in told the microbatch's."""
    for layer in module.modules():
        if getattr(layer, "batch_size", -1) > 0:  # type: ignore[operator]
            layer.batch_size = batch  # type: ignore[assignment]
    return module
