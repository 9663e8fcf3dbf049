"""Fused neurons beside what they stand for: networks of one or two blocks, run with kernels and without.

Run as a program (`python -m tests.runtime.kernels.fused short`, or `long`) it does so for the cases in Triton's
interpreter, which is chosen before Triton is imported, and prints one JSON line a case.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, multiprocessing, nn

from snnpart import frameworks, shared_statistics
from snnpart.compilation import Options, compile_program
from snnpart.graph import Body
from snnpart.ops_fused import FusedNeuron
from snnpart.program import CompiledProgram
from snnpart.runtime.collectives import Axis, GroupCollectives
from snnpart.runtime.kernels.fused_neuron import Fused
from tests.nets import Spike
from tests.runtime.kernels.hand_written import Columns, SamplesFirst, leaky, learned, networks, towards


class Block(nn.Module):
    """[T, N, C, H, W] -> the same: convolution, norm, a neuron for all steps, and what the input had (`residual`)."""

    def __init__(self, neuron: nn.Module, *, channels: int = 5, residual: bool = True, norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.neuron, self.residual = neuron, residual
        with torch.no_grad():
            self.conv.weight.mul_(2.0)
            if norm:
                self.norm.weight.uniform_(0.8, 1.6)
                self.norm.bias.uniform_(0.1, 0.6)
                self.norm.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr, operator]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.flatten(0, 1))).unflatten(0, x.shape[:2])
        spikes: Tensor = self.neuron(y)
        return spikes + x if self.residual else spikes


class Still(Block):
    """A block that is shown the first image of its input at every step."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x[:1].repeat(x.shape[0], 1, 1, 1, 1).flatten(0, 1)))
        spikes: Tensor = self.neuron(y.unflatten(0, x.shape[:2]))
        return spikes + x if self.residual else spikes


class Steps(nn.Module):
    """The same as a loop over time of a neuron that takes one step and is given its state. `still`: it is shown the
    first image at every step."""

    def __init__(
        self, step: Callable[..., Any], *, channels: int = 5, states: int = 1, norm: bool = False, still: bool = False
    ) -> None:
        super().__init__()
        self.conv, self.step, self.states = nn.Conv2d(channels, channels, 3, padding=1), step, states
        self.norm, self.still = nn.BatchNorm2d(channels) if norm else nn.Identity(), still
        with torch.no_grad():
            if norm:
                self.norm.weight.uniform_(0.8, 1.6)
                self.norm.bias.uniform_(0.1, 0.6)
                self.norm.running_mean.uniform_(-0.2, 0.2)  # type: ignore[union-attr, operator]
            self.conv.weight.mul_(3.0)
            self.conv.bias.uniform_(0.3, 0.9)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        state: tuple[Any, ...] = (None,) * self.states
        made, first = [], x[0]
        for t in range(x.shape[0]):
            shown = first if self.still else x[t]
            spikes, *state = self.step(self.norm(self.conv(shown)), *state)  # type: ignore[assignment]
            made.append(spikes)
        return torch.stack(made)


class Written(nn.Module):
    """A neuron in plain torch: learnable leak and threshold, soft reset that is not detached."""

    def __init__(self) -> None:
        super().__init__()
        self.leak, self.threshold = nn.Parameter(torch.tensor(0.4)), nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
        v = x if v is None else v * torch.sigmoid(self.leak) + x
        spikes: Tensor = Spike.apply(v - self.threshold)
        return spikes, v - spikes * self.threshold


@dataclass(frozen=True)
class Case:
    """A network, its number of steps, the mode, the dtype it is exact in (snnTorch, Norse, sinabs: float32), samples,
    and which of its input's first two dims are time and samples."""

    make: Callable[[], nn.Module]
    steps: int = 4
    training: bool = True
    dtype: torch.dtype = torch.float64
    fused: int = 1
    samples: int = 2
    layout: str = "TNCHW"


def cases() -> dict[str, Case]:
    """All cases by name."""
    import snntorch as snn

    from tests.runtime.kernels.layers import norse_cases, sinabs_cases, spikingjelly_cases, spikingjelly_neurons

    found = {name: Case(partial(_block, make)) for name, make in spikingjelly_neurons().items()}
    lif = spikingjelly_neurons()["LIF-detached"]
    found |= {
        "eval": Case(partial(_block, lif), training=False),
        "still": Case(lambda: Still(lif())),
        "still, eval": Case(lambda: Still(lif()), training=False),
        "still, long": Case(lambda: Still(spikingjelly_neurons()["PLIF"](), residual=False), steps=20),
        "plain": Case(partial(_block, lif, residual=False)),
        "plain, no norm": Case(partial(_block, lif, norm=False, residual=False)),
        "no norm": Case(partial(_block, lif, norm=False)),
        "long": Case(partial(_block, spikingjelly_neurons()["PLIF"]), steps=20),
        "prime": Case(partial(_block, lif), steps=17),
        "columns": Case(Columns),
        "samples first": Case(lambda: SamplesFirst(leaky, torch.zeros_like)),
        "samples first, plain": Case(lambda: SamplesFirst(learned, lambda x: 0.0, norm=False), training=False),
        "samples first, long": Case(lambda: SamplesFirst(towards, torch.zeros_like), steps=20),
        "written": Case(lambda: Steps(Written())),
        "written, long": Case(lambda: Steps(Written()), steps=18),
        "each step's statistics": Case(lambda: Steps(Written(), norm=True)),
        "each step's statistics, eval": Case(lambda: Steps(Written(), norm=True), training=False),
        "each of 9 steps' statistics": Case(lambda: Steps(Written(), norm=True), steps=9),
        "each of 17 steps' statistics": Case(lambda: Steps(Written(), norm=True), steps=17),
        "still in a loop": Case(lambda: Steps(Written(), still=True)),
        "still in a loop, norm": Case(lambda: Steps(Written(), norm=True, still=True), steps=9),
        "still in a loop, norm, eval": Case(lambda: Steps(Written(), norm=True, still=True), training=False),
        "Leaky": Case(lambda: Steps(snn.Leaky(beta=0.9, learn_beta=True)), dtype=torch.float32),
        "Synaptic": Case(lambda: Steps(snn.Synaptic(alpha=0.8, beta=0.9), states=2), dtype=torch.float32),
        "Alpha": Case(lambda: Steps(snn.Alpha(alpha=0.9, beta=0.8), states=3), dtype=torch.float32),
    }
    found |= {name: Case(networks()[name]) for name in WRITTEN}
    found |= {f"one sample, {name}": replace(found[name], samples=1) for name in SHARED}
    found |= spikingjelly_cases() | sinabs_cases()
    return found | norse_cases() if importlib.util.find_spec("norse") else found


WRITTEN = ("leaky from zeros, all steps", "learned from a number, each step", "integrating from one zero, all steps",
           "towards from what it tends to, each step", "reset later from zeros, all steps")  # fmt: skip
SHARED = ("LIF-detached", "still", "each step's statistics")
"""Cases that are also run with one sample, and by two ranks, which share BatchNorm's statistics."""
ONE_SAMPLE = tuple(f"one sample, {name}" for name in SHARED)
BOTH_LAYOUTS = ("LIF-detached", "PLIF", "long", "still", "each step's statistics", "sinabs LIF", "sinabs long",
                *ONE_SAMPLE)  # fmt: skip
SHORT = ("LIF-detached", "LIF-soft", "PLIF", "TernaryLIF", "eval", "long", "still", "written", "columns", "Synaptic",
         "each step's statistics", "samples first", "Norse layer LIF", "sinabs LIF", "sinabs rows by samples",
         *WRITTEN[:2], *ONE_SAMPLE)  # fmt: skip
"""What the default tests run; the rest belongs to the long matrix."""


def _block(make: Callable[[], nn.Module], **given: Any) -> nn.Module:
    return Block(make(), **given)


class Kernels(Body):
    """Runs fused neurons with kernels."""

    def bound(self, target: Any) -> Any:
        bound = super().bound(target)
        return Fused(target, self, bound) if isinstance(target, FusedNeuron) else bound


Run = tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]


@dataclass(frozen=True)
class _Program:
    """A compiled case, from which bodies with or without kernels are made."""

    compiled: CompiledProgram
    training: bool
    device: torch.device
    samples_dim: int = 1

    @property
    def graph(self) -> fx.Graph:
        return self.compiled.stages[0, 0].graph

    @property
    def fused(self) -> int:
        return sum(isinstance(node.target, FusedNeuron) for node in self.graph.nodes)

    def body(self, kind: type[Body]) -> Body:
        program, known = self.compiled.stages[0, 0], self.compiled.source.tensors
        own = {
            part.name: ("parameter" if part.requires_grad else part.kind, known[part.name].tensor.detach().clone())
            for part in program.tensors
            if not part.leaf
        }
        leaves = {path: frameworks.clone_leaf(info.module, {}) for path, info in program.leaves.items()}
        return kind(own, leaves).to(self.device).train(self.training)

    def run(self, body: Body, x: Tensor) -> Tensor:
        for path in self.compiled.stages[0, 0].leaves:
            for part in body.get_submodule(path).modules():
                frameworks.adapter_for(part).reset(part)
        sized = any(node.op == "placeholder" and node.target == "batch_size" for node in self.graph.nodes)
        found: Tensor = body.bind(self.graph)(x, *([x.shape[self.samples_dim]] if sized else []))[0]
        return found


def _compiled(case: Case, x: Tensor, dtype: torch.dtype, **given: Any) -> _Program:
    torch.manual_seed(0)
    model = case.make().to(dtype).train(case.training)
    options = Options(input_layout=case.layout, verify="off", **{"fuse": True, **given})
    compiled, _ = compile_program(model, x.cpu().to(dtype), options, training=case.training)
    return _Program(compiled, case.training, x.device, case.layout.index("N"))


def both(
    case: Case,
    x: Tensor,
    *,
    dtype: torch.dtype,
    channels_last: bool = False,
    captured: bool = False,
    kinds: tuple[type[Body], type[Body]] | None = None,
    **options: Any,
) -> tuple[Run, Run, int]:
    """Output, gradients (the input's as `x`) and buffers of the case without kernels and with; how many nodes fused.

    `kinds`: other bodies. `captured`: kernels are replayed from a CUDA graph that was captured on other input.
    """
    program = _compiled(case, x, dtype, **options)
    generator = torch.Generator().manual_seed(1)
    given = _channels_last(x.to(dtype)) if channels_last else x.to(dtype)
    weights = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(given)
    runs = []
    for kind in kinds or (Body, Kernels):
        body = program.body(kind)
        own = given.detach().clone().requires_grad_()
        if captured and kind is Kernels:
            y = _replayed(program, body, own, weights)
        else:
            y = program.run(body, own)
            (y * weights).sum().backward()
        grads = {"x": own.grad} | {name: p.grad for name, p in body.named_parameters()}
        runs.append((y.detach(), grads, dict(_kept(body))))
    return runs[0], runs[1], program.fused


def _kept(body: Body) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are not a neuron's state."""
    state = {"mem", "spk", "syn", "syn_exc", "syn_inh", "v_mem", "i_syn", "b", "spike_threshold"}
    yield from ((n, b.detach()) for n, b in body.named_buffers() if n.rpartition(".")[2] not in state)


def _channels_last(x: Tensor) -> Tensor:
    return x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, x.shape[:2])


def _replayed(program: _Program, body: Body, x: Tensor, weights: Tensor) -> Tensor:
    """The output of one replay on x; everything that warm-up and capture changed is put back first."""
    wanted = x.detach().clone()
    before = {name: value.detach().clone() for name, value in body.state_dict().items()}
    with torch.no_grad():
        x.uniform_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            (program.run(body, x) * weights).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    x.grad, graph = None, torch.cuda.CUDAGraph()
    for parameter in body.parameters():
        parameter.grad = None
    with torch.cuda.graph(graph):
        y = program.run(body, x)
        (y * weights).sum().backward()
    with torch.no_grad():
        x.copy_(wanted)
        for name, value in body.state_dict().items():
            value.copy_(before[name])
    graph.replay()
    torch.cuda.synchronize()
    return y


def region(case: Case, device: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """The fused node of a case without norm and addition as a function of x [T, N, ...]: with a kernel, and without."""
    program = _compiled(case, example(case, device), torch.float32)
    node = next(node for node in program.graph.nodes if isinstance(node.target, FusedNeuron))
    target: Any = node.target
    assert len(node.args) == 1
    body = program.body(Kernels)
    return body.bound(target), target.over(body.bind)


def errors(wanted: Run, found: Run) -> dict[str, float]:
    """The largest difference of each value, by the largest number in it."""
    named: list[tuple[str, Tensor | None, Tensor | None]] = [("output", wanted[0], found[0])]
    named += [(f"gradient {name}", grad, found[1][name]) for name, grad in wanted[1].items()]
    named += [(f"buffer {name}", value, found[2][name]) for name, value in wanted[2].items()]
    return {name: _error(a, b) for name, a, b in named}


def _error(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / a.abs().max().clamp_min(1.0))


def example(case: Case, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(2)
    first = [{"T": case.steps, "N": case.samples}[letter] for letter in case.layout[:2]]
    return (torch.rand((*first, 5, 4, 3), generator=generator, dtype=case.dtype) * 2).to(device)


def silent_in(run: Run, model: nn.Module) -> list[str]:
    """What learns in the model, or its input, and had no gradient."""
    frozen = {key for key, value in model.named_parameters() if not value.requires_grad}
    return [key for key, grad in run[1].items() if grad is None and key not in frozen]


def report(name: str, case: Case, channels_last: bool, x: Tensor | None = None) -> Mapping[str, Any]:
    """How far the kernels are from the separate operations on x, by default the example."""
    x = example(case) if x is None else x
    wanted, found, fused = both(case, x, dtype=case.dtype, channels_last=channels_last)
    model = case.make()
    silent = silent_in(wanted, model)
    spikes = wanted[0] - x if getattr(model, "residual", False) else wanted[0]
    rate = float((spikes.abs() > 0.5).double().mean())
    return {
        "case": name,
        "last": channels_last,
        "fused": fused,
        "rate": rate,
        "silent": silent,
        "errors": errors(wanted, found),
    }


def plan() -> list[tuple[str, bool]]:
    """The cases with the layouts to run them in: some in both, the others in turn."""
    return [
        (name, channels_last)
        for number, name in enumerate(cases())
        for channels_last in ((False, True) if name in BOTH_LAYOUTS else (number % 2 == 0,))
    ]


def shared(rank: int, store: str) -> None:
    """The cases of one of two ranks, the second of which has fewer samples."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    sums = GroupCollectives({"dp": Axis(dist.group.WORLD, rank, (0, 1))})
    for name in SHARED:
        case = cases()[name]
        x = example(case)[:, : 2 - rank] + 0.2 * rank
        with shared_statistics.sharing(lambda x: sums.all_reduce(sums.grad_all_reduce(x, "dp"), "dp")):
            found = report(name, case, rank == 1, x)
        sys.stdout.write(json.dumps({**found, "rank": rank}) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    if sys.argv[1] == "shared":
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(shared, (f"{folder}/store",), nprocs=2)
        sys.exit()
    for name, channels_last in (one for one in plan() if (one[0] in SHORT) is (sys.argv[1] == "short")):
        sys.stdout.write(json.dumps(report(name, cases()[name], channels_last)) + "\n")
