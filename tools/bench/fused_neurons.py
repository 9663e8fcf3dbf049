"""Norm, neuron and addition in one kernel, against the separate operations and against torch.compile, on one GPU.

    python tools/bench/fused_neurons.py             the layers of SEW-ResNet34 at 128x128, T=4, bfloat16, channels last
    python tools/bench/fused_neurons.py --quick     one small layer, once

A time is forward and backward of one layer, replayed from a CUDA graph, so that launches do not count. Bytes are those
the algorithm must move: forward reads x for the statistics and again with the residual, and writes the spikes;
backward reads x and the gradient for the sums over channels and again for x's gradient, which it writes. The rate is
compared with that of a copy on the same GPU. The gradient of the norm's weight is compared with what the separate
operations give in float32 on the same bfloat16 numbers; ours may be no further off than the peer's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from snnpart import facts, frameworks  # noqa: E402
from snnpart.compilation import Options, compile_program  # noqa: E402
from snnpart.facts import Value  # noqa: E402
from snnpart.ops_fused import FusedNeuron  # noqa: E402
from snnpart.runtime.stage import StageModule  # noqa: E402
from tools.bench import rows as results  # noqa: E402
from tools.bench.rows import Row, read, replaced, write  # noqa: E402

STEPS = 4
CLOSE = 1e-2
MOVED = 9  # tensors of x's size that forward and backward move
LAYERS = {"stem": (64, 64), "layer1": (64, 32), "layer2": (128, 16), "layer3": (256, 8), "layer4": (512, 4)}
Run = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """[T, N, C, H, W], twice: a norm, SpikingJelly's LIF, and the addition of the second input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        from spikingjelly.activation_based import neuron, surrogate

        self.norm = nn.BatchNorm2d(channels)
        self.neuron = neuron.LIFNode(detach_reset=True, surrogate_function=surrogate.ATan(), step_mode="m")

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y = self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        spikes: Tensor = self.neuron(y)
        return spikes + residual


class Spike(torch.autograd.Function):
    """The surrogate of the compiled variant: ATan."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v >= 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        return grad / (1 + (math.pi * v) ** 2)


def _plain(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """The layer in plain torch, for torch.compile."""
    y = F.batch_norm(x.flatten(0, 1), mean, var, weight, bias, True, 0.1, 1e-5).view(x.shape)
    v, made = torch.zeros_like(y[0], dtype=torch.float32), []
    for step in y.unbind(0):
        h = v + (step.float() - v) * 0.5
        s = Spike.apply(h - 1.0)
        v = h * (1 - s.detach())
        made.append(s.to(x.dtype))
    return torch.stack(made) + residual


def _program(channels: int) -> tuple[Run, Run]:
    """The compiled layer over a stage's module: with kernels, and as separate operations."""
    x = torch.rand(STEPS, 2, channels, 4, 4)
    options = Options(input_layout="TNCHW", verify="off", fuse=True)
    compiled, _ = compile_program(Layer(channels), (x, x), options)
    program = compiled.stages[0, 0]
    (node,) = [node for node in program.graph.nodes if isinstance(node.target, FusedNeuron)]
    module = StageModule({}, {path: frameworks.clone_leaf(i.module, {}) for path, i in program.leaves.items()}).cuda()
    target: Any = node.target
    names = [one.name for one in target.region.nodes if one.op == "placeholder"]
    sizes = {one.name for one in target.region.nodes if facts.get(one, Value) is None}

    def over(function: Callable[..., Tensor]) -> Run:
        def run(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
            for leaf in module.modules():
                frameworks.adapter_for(leaf).reset(leaf)
            known = {"weight": weight, "bias": bias, "mean": mean, "var": var, "training": True, "tracked": None}
            known |= dict.fromkeys(sizes - {"training"}, x.shape[1])
            given = [_given(name, known, x, residual) for name in names]
            return function(*given).view(x.shape)

        return run

    return over(module.bound(target)), over(target.over(module.bind))


def _given(name: str, known: dict[str, Any], x: Tensor, residual: Tensor) -> Any:
    """The value of a region's placeholder, which is named after what it is."""
    for part, value in known.items():
        if part in name:
            return value
    return residual if "residual" in name else x.flatten(0, 1)


@dataclass(frozen=True)
class Point:
    """A layer at a batch size."""

    name: str
    channels: int
    side: int
    batch: int

    @property
    def bytes(self) -> int:
        return MOVED * 2 * STEPS * self.batch * self.channels * self.side**2

    def tensors(self) -> tuple[Tensor, ...]:
        made = torch.Generator("cuda").manual_seed(0)
        flat = torch.randn(STEPS * self.batch, self.channels, self.side, self.side, device="cuda", generator=made)
        x = flat.to(torch.bfloat16).contiguous(memory_format=torch.channels_last).unflatten(0, (STEPS, -1))
        weight = torch.full((self.channels,), 1.5, device="cuda", requires_grad=True)
        bias = torch.full((self.channels,), 0.5, device="cuda", requires_grad=True)
        statistics = torch.zeros(self.channels, device="cuda"), torch.ones(self.channels, device="cuda")
        return (x.requires_grad_(), torch.zeros_like(x).requires_grad_(), weight, bias, *statistics)


def _gradients(run: Run, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of x, the residual, weight and bias, for a gradient of the result that does not depend on it."""
    made = torch.Generator("cuda").manual_seed(1)
    grad = torch.rand(tensors[0].shape, device="cuda", generator=made).to(torch.bfloat16)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    return torch.autograd.grad(run(*tensors), wanted, _laid_out_as(grad, tensors[0]))


def _laid_out_as(value: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(value)


def measure(run: Run, point: Point, repeats: int) -> tuple[list[float], Tensor]:
    """Microseconds of forward and backward, and the gradient of the norm's weight."""
    tensors = point.tensors()
    grad = _laid_out_as(torch.rand_like(tensors[0]), tensors[0])
    wanted = [tensor for tensor in tensors if tensor.requires_grad]

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(*tensors), wanted, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = _gradients(run, tensors)[2]
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return [_replay(graph) for _ in range(repeats)], found


def exact(separate: Run, point: Point) -> Tensor:
    """The gradient of the norm's weight when the separate operations compute in float32 on the same numbers."""
    x, residual, *rest = point.tensors()
    return _gradients(
        separate, (x.detach().float().requires_grad_(), residual.detach().float().requires_grad_(), *rest)
    )[2]


def _replay(graph: torch.cuda.CUDAGraph, times: int = 10) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / times


def copy_rate() -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    x = torch.empty(2**29, dtype=torch.bfloat16, device="cuda")
    y = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(x)
    return 2 * x.numel() * 2 / (1e-6 * min(_replay(graph) for _ in range(3)))


def rows(point: Point, repeats: int, rate: float) -> list[Row]:
    """A row for each peer, taken in turn with ours."""
    ours_run, separate = _program(point.channels)
    peers = {"separate operations": separate, "torch.compile": torch.compile(_plain, dynamic=False)}
    made = []
    torch.compiler.reset()
    wanted = exact(separate, point)
    for name, run in peers.items():
        peer, theirs = measure(run, point, repeats)
        ours, found = measure(ours_run, point, repeats)
        off = [float((one - wanted).norm() / wanted.norm()) for one in (found, theirs)]
        made.append(_row(point, name, peer, ours, off, rate))
        print(f"{point.name} against {name}: {made[-1]['ratio']} ({made[-1]['note']})", flush=True)
    return made


def _row(point: Point, name: str, peer: list[float], ours: list[float], off: list[float], rate: float) -> Row:
    a, b = statistics.median(peer), statistics.median(ours)
    share = point.bytes / (1e-6 * b) / rate
    return results.row(
        "fused_neurons",
        point.name,
        "forward + backward",
        "us",
        peer_name=name,
        peer=f"{a:.4g}",
        ours=f"{b:.4g}",
        ratio=f"{a / b:.3f}",
        repeats=len(ours),
        spread=f"{(max(ours) - min(ours)) / b:.3f}",
        machine=torch.cuda.get_device_name(),
        status="ok" if off[0] <= max(off[1], CLOSE) else "failed",
        note=f"{share:.2f} of the copy rate of {rate / 1e12:.2f} TB/s; gradient of the weight off by "
        f"{off[0]:.0e}, the peer's by {off[1]:.0e}",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small layer, once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, action="append", help="batch size; may be given again; default 32 and 256")
    parser.add_argument("--output", type=Path, help="CSV; default docs/results/fused_neurons.csv (not with --quick)")
    options = parser.parse_args()
    batches = [2] if options.quick else options.batch or [32, 256]
    layers = {"layer4": LAYERS["layer4"]} if options.quick else LAYERS
    points = [Point(f"{name} N={batch}", *size, batch) for batch in batches for name, size in layers.items()]
    rate = copy_rate()
    output = options.output or (None if options.quick else ROOT / "docs/results/fused_neurons.csv")
    table: list[Row] = []
    for point in points:
        table += rows(point, 1 if options.quick else options.repeats, rate)
        if output is not None:
            write(output, replaced(read(output), table, key=lambda one: one["point"]))
    return int(any(row["status"] != "ok" for row in table))


if __name__ == "__main__":
    sys.exit(main())
