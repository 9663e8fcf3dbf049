"""Networks with a time loop of any length, small enough to fold many of them, and a random family of such networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.neurons import spike
from tests.zoo_models import KeepDtype


class ArgumentLIF(nn.Module):
    """A hand-written neuron with its state in the arguments; `reset` is soft, hard or none."""

    def __init__(self, reset: str = "soft", decay: float = 0.6, threshold: float = 0.4) -> None:
        super().__init__()
        self.reset_by, self.decay, self.threshold = reset, decay, threshold

    def forward(self, x: Tensor, v: Any) -> tuple[Tensor, Tensor]:
        v = x if v is None else self.decay * v + x
        s: Tensor = spike(v - self.threshold)
        if self.reset_by == "soft":
            v = v - self.threshold * s
        elif self.reset_by == "hard":
            v = v * (1.0 - s.detach())
        return s, v


class OverSamples(nn.Module):
    """A norm over the samples, whose mean and variance come as one result."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 0, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-3)


Source = Literal["constant", "batch-first", "time-first", "unbind", "reversed", "delayed", "held"]
Readout = Literal["sum", "mean", "stack", "stack-last-dim", "cat", "last", "list", "max", "membranes"]
Begin = Literal["none", "zero", "zeros"]


@dataclass(frozen=True)
class Layer:
    """One layer of a random network: norm, neuron, and what is added to it."""

    norm: Literal["none", "batch", "layer", "group", "by hand"] = "none"
    reset: Literal["soft", "hard", "none"] = "soft"
    begin: Begin = "none"
    skip: Literal["none", "add", "cat", "late"] = "none"
    feedback: bool = False


@dataclass(frozen=True)
class Shape:
    """A random network: its layers, its input, what it returns, and its number of steps."""

    layers: tuple[Layer, ...] = (Layer(), Layer())
    source: Source = "constant"
    readout: Readout = "stack"
    steps: int = 3


WIDTH = 6


class RandomLoop(nn.Module):
    """The network that a `Shape` describes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        norms = {
            "none": nn.Identity,
            "batch": lambda: nn.BatchNorm1d(WIDTH),
            "layer": lambda: nn.LayerNorm(WIDTH),
            "group": lambda: nn.GroupNorm(2, WIDTH),
            "by hand": OverSamples,
        }
        wide = [WIDTH * (1 + (layer.skip == "cat")) for layer in shape.layers]
        self.linears = nn.ModuleList(nn.Linear(w, WIDTH) for w in [WIDTH, *wide[:-1]])
        self.norms = nn.ModuleList(norms[layer.norm]() for layer in shape.layers)
        self.neurons = nn.ModuleList(ArgumentLIF(layer.reset) for layer in shape.layers)
        self.backs = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH) if layer.feedback else nn.Identity() for layer in shape.layers
        )
        self.head = nn.Linear(wide[-1], 3)

    def forward(self, x: Tensor) -> Any:
        shape = self.shape
        n = x.shape[1] if shape.source in ("time-first", "unbind") else x.shape[0]
        zero = {"none": None, "zero": 0.0, "zeros": x.new_zeros(n, WIDTH)}
        state: list[Any] = [zero[layer.begin] for layer in shape.layers]
        last: list[Any] = [
            x.new_zeros(n, WIDTH) if layer.feedback or layer.skip == "late" else None for layer in shape.layers
        ]
        out: list[Tensor] = []
        membranes: list[Tensor] = []
        total: Any = 0.0
        for now in self._steps(x):
            for i, layer in enumerate(shape.layers):
                current = self.norms[i](self.linears[i](now))
                if layer.feedback:
                    current = current + 0.3 * self.backs[i](last[i])
                s, state[i] = self.neurons[i](current, state[i])
                if layer.skip == "add":
                    now = s + now[:, :WIDTH]
                elif layer.skip == "cat":
                    now = torch.cat([s, now[:, :WIDTH]], 1)
                elif layer.skip == "late":
                    now = s + 0.5 * last[i]
                else:
                    now = s
                last[i] = s
            y = self.head(now)
            out.append(y)
            membranes.append(state[-1])
            total = total + y
        return self._read(out, membranes, total)

    def _steps(self, x: Tensor) -> Any:
        count = range(self.shape.steps)
        if self.shape.source == "constant":
            return [x for _ in count]
        if self.shape.source == "batch-first":
            return (x[:, t] for t in count)
        if self.shape.source == "time-first":
            return (x[t] for t in count)
        if self.shape.source == "unbind":
            return x
        order = {"reversed": lambda t: -1 - t, "delayed": lambda t: t - 1, "held": lambda t: max(t - 2, 0)}
        return (x[:, order[self.shape.source](t)] for t in count)

    def _read(self, out: list[Tensor], membranes: list[Tensor], total: Any) -> Any:
        read = {
            "sum": lambda: total,
            "mean": lambda: total / self.shape.steps,
            "stack": lambda: torch.stack(out),
            "stack-last-dim": lambda: torch.stack(out, -1),
            "cat": lambda: torch.cat(out, 1),
            "last": lambda: out[-1],
            "list": lambda: out,
            "max": lambda: torch.stack(out).max(0).values,
            "membranes": lambda: (torch.stack(out), torch.stack(membranes), membranes[-1]),
        }
        return read[self.shape.readout]()

    def dims(self) -> dict[str, Any]:
        """Where batch and time are in its input."""
        source = self.shape.source
        if source == "constant":
            return {}
        return {"in_dims": 1, "time_dims": 0} if source in ("time-first", "unbind") else {"in_dims": 0, "time_dims": 1}

    def input(self, batch: int = 3) -> Tensor:
        steps, source = self.shape.steps, self.shape.source
        if source == "constant":
            size: tuple[int, ...] = (batch, WIDTH)
        else:
            size = (steps, batch, WIDTH) if source in ("time-first", "unbind") else (batch, steps, WIDTH)
        return torch.randn(size, dtype=torch.float64)


class ConvLoop(nn.Module):
    """The field's tutorial network: convolutions, pooling, snnTorch neurons, membranes recorded."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        import snntorch as snn

        options: dict[str, Any] = {"spike_grad": KeepDtype.apply}
        self.steps = steps
        self.conv1, self.lif1 = nn.Conv2d(1, 4, 3), snn.Leaky(beta=0.9, **options)
        self.conv2, self.lif2 = nn.Conv2d(4, 5, 3), snn.Leaky(beta=0.8, learn_beta=True, **options)
        self.fc, self.lif3 = nn.Linear(5, 3), snn.Leaky(beta=0.9, reset_mechanism="zero", **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mem1, mem2, mem3 = self.lif1.init_leaky(), self.lif2.init_leaky(), self.lif3.init_leaky()
        spikes, membranes = [], []
        for _ in range(self.steps):
            spk1, mem1 = self.lif1(F.max_pool2d(self.conv1(x), 2), mem1)
            spk2, mem2 = self.lif2(F.avg_pool2d(self.conv2(spk1), 2), mem2)
            spk3, mem3 = self.lif3(self.fc(spk2.flatten(1)), mem3)
            spikes.append(spk3)
            membranes.append(mem3)
        return torch.stack(spikes), torch.stack(membranes)


class SnnTorchLoop(nn.Module):
    """Two linear layers with snnTorch neurons whose state is handed on in a tuple."""

    def __init__(self, kind: str, steps: int, **options: Any) -> None:
        super().__init__()
        import snntorch as snn

        neuron: Any = getattr(snn, kind)
        self.steps = steps
        self.fc1, self.first = nn.Linear(6, 7), neuron(spike_grad=KeepDtype.apply, **options)
        self.fc2, self.second = nn.Linear(7, 5), neuron(spike_grad=KeepDtype.apply, **options)

    def forward(self, x: Tensor) -> Tensor:
        one: Any = self.first.reset_mem()
        two: Any = self.second.reset_mem()
        one, two = ([s] if isinstance(s, Tensor) else s for s in (one, two))
        out = []
        for _ in range(self.steps):
            s, *one = self.first(self.fc1(x), *one)
            s, *two = self.second(self.fc2(s), *two)
            out.append(s + two[-1])
        return torch.stack(out, dim=1)


class RLeakyLoop(nn.Module):
    """A recurrent layer between two linear ones, with a frame for each step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        import snntorch as snn

        self.fc, self.cell = nn.Linear(6, 7), snn.RLeaky(beta=0.9, linear_features=7, spike_grad=KeepDtype.apply)
        self.out = nn.Linear(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        spk, mem = self.cell.init_rleaky()
        record = []
        for t in range(x.shape[1]):
            spk, mem = self.cell(self.fc(x[:, t]), spk, mem)
            record.append(self.out(spk) + self.out(mem))
        return torch.stack(record)


class NorseLoop(nn.Module):
    """SequentialState, whose state begins as None."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        import norse.torch as norse

        fast = norse.LIFParameters(tau_mem_inv=torch.tensor(500.0), tau_syn_inv=torch.tensor(300.0))
        parts = [
            nn.Conv2d(1, 4, 3),
            norse.LIFCell(fast),
            nn.Flatten(),
            nn.Linear(64, 5),
            norse.LIFCell(fast),
            norse.LICell(),
        ]
        self.steps, self.net = steps, norse.SequentialState(*parts)

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for _ in range(self.steps):
            y, state = self.net(x, state)
            out.append(y)
        return torch.stack(out).max(0).values


class LsnnLoop(nn.Module):
    """Recurrent cells with adaptive thresholds, over the frames of a tensor."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        import norse.torch as norse

        fast = norse.LSNNParameters(tau_mem_inv=torch.tensor(500.0), tau_syn_inv=torch.tensor(300.0))
        self.cell, self.readout = norse.LSNNRecurrentCell(6, 7, p=fast), norse.LILinearCell(7, 3)
        with torch.no_grad():
            self.cell.input_weights.mul_(6)

    def forward(self, x: Tensor) -> Tensor:
        one, two, out = None, None, []
        for step in x:
            spikes, one = self.cell(step, one)
            y, two = self.readout(spikes, two)
            out.append(y)
        return torch.stack(out)


class Scaled(nn.Module):
    """Case A18: state that begins as a Python float, a frame for each step, functional dropout, a mean at the end."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        v = out = 0.0
        for t in range(x.shape[1]):
            v = 0.5 * v + self.a(x[:, t])
            z = spike(v - 0.4)
            v = v * (1 - z.detach())
            out = out + self.b(F.dropout(z, 0.5, self.training))
        return out / x.shape[1]


class Residual(nn.Module):
    """Case A08: convolution, BatchNorm and a hand-written neuron in residual blocks, static images."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.convs = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)])
        self.neurons = nn.ModuleList([ArgumentLIF(), ArgumentLIF("hard")])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: list[Any] = [None, None]
        out: Any = 0.0
        for _ in range(self.steps):
            y = x
            for i in range(2):
                s, state[i] = self.neurons[i](self.norms[i](self.convs[i](y)), state[i])
                y = s + y if i else s
            out = out + self.head(y.mean((2, 3)))
        return out / self.steps
