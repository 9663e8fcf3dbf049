"""Neurons as people write them: the same dynamics with states that begin in different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.nets import Spike

Neuron = Callable[["HandWritten", Any, Tensor], tuple[Tensor, Any]]
"""State before the step and x -> spikes, state after it."""
Begin = Callable[[Tensor], Any]
"""The first state, made like one step of x."""


class HandWritten(nn.Module):
    """[T, N, 5, H, W] -> spikes: a convolution and a norm of all steps at once (`batched`) or of each step in turn, and
    a neuron in a plain loop."""

    def __init__(self, neuron: Neuron, begin: Begin, *, batched: bool = True, norm: bool = True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5) if norm else nn.Identity()
        self.decay: Any = nn.Parameter(torch.tensor(0.6)) if neuron is learned else None
        self.neuron, self.begin, self.batched = neuron, begin, batched
        with torch.no_grad():
            self.conv.weight.mul_(3.0)
            if norm:
                self.norm.weight.uniform_(0.8, 1.6)
                self.norm.bias.uniform_(0.1, 0.6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.flatten(0, 1))).unflatten(0, x.shape[:2]) if self.batched else x
        state, made = None, []
        for t in range(x.shape[0]):
            current = y[t] if self.batched else self.norm(self.conv(y[t]))
            state = self.begin(current) if t == 0 else state
            spikes, state = self.neuron(self, state, current)
            made.append(spikes)
        return torch.stack(made)


def leaky(m: HandWritten, v: Any, x: Tensor) -> tuple[Tensor, Any]:
    """Soft reset."""
    v = 0.7 * v + x
    spikes: Tensor = Spike.apply(v - 1.0)
    return spikes, v - spikes


def learned(m: HandWritten, v: Any, x: Tensor) -> tuple[Tensor, Any]:
    """A learned leak, hard reset."""
    v = v * m.decay + x
    spikes: Tensor = Spike.apply(v - 1.0)
    return spikes, v * (1 - spikes)


def integrating(m: HandWritten, v: Any, x: Tensor) -> tuple[Tensor, Any]:
    """No leak, detached reset."""
    v = v + x
    spikes: Tensor = Spike.apply(v - 1.0)
    return spikes, v - spikes.detach()


def towards(m: HandWritten, v: Any, x: Tensor) -> tuple[Tensor, Any]:
    """The membrane goes half the way to its input."""
    v = v + (x - v) / 2.0
    spikes: Tensor = Spike.apply(v - 0.4)
    return spikes, torch.where(spikes > 0, torch.zeros_like(v), v)


def reset_later(m: HandWritten, state: Any, x: Tensor) -> tuple[Tensor, Any]:
    """The reset is made by the next step, of the spikes of this one."""
    v, before = state
    v = 0.7 * v * (1 - before) + x
    spikes: Tensor = Spike.apply(v - 1.0)
    return spikes, (v, spikes)


BEGINS: dict[str, Begin] = {
    "zeros": torch.zeros_like,
    "a number": lambda x: 0.0,
    "a whole number": lambda x: 0,
    "one zero": lambda x: torch.zeros((), dtype=x.dtype),
    "what it tends to": lambda x: torch.full_like(x, 0.25),
}
NEURONS: dict[str, Neuron] = {
    "leaky": leaky, "learned": learned, "integrating": integrating, "towards": towards,
}  # fmt: skip
PAIRED: dict[str, Begin] = {"zeros": lambda x: (torch.zeros_like(x),) * 2, "a number": lambda x: (0.0, 0.0)}


UNKNOWN = ("learned", "what it tends to")
"""A neuron that begins with a number times a parameter, which no kernel is told."""


def networks() -> dict[str, Callable[[], nn.Module]]:
    """Every neuron from every beginning but one, behind a layer of all steps and behind one of each."""
    ways = {"all steps": True, "each step": False}
    pairs = [(name, begin) for name in NEURONS for begin in BEGINS if (name, begin) != UNKNOWN]
    plain = {(name, begin): (NEURONS[name], BEGINS[begin]) for name, begin in pairs}
    plain |= {("reset later", begin): (reset_later, made) for begin, made in PAIRED.items()}
    return {
        f"{name} from {begin}, {way}": lambda neuron=neuron, first=first, batched=batched: HandWritten(  # type: ignore[misc]
            neuron, first, batched=batched
        )
        for (name, begin), (neuron, first) in plain.items()
        for way, batched in ways.items()
    }


class SamplesFirst(HandWritten):
    """The same over [N, T, ...], which layers see as rows [N*T, ...] (TET's networks); with `residual` x is added."""

    def __init__(self, neuron: Neuron, begin: Begin, *, norm: bool = True, residual: bool = False) -> None:
        super().__init__(neuron, begin, norm=norm)
        self.added = residual

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        y = self.norm(self.conv(x.flatten(0, 1).contiguous())).view(x.shape)
        state, made = self.begin(y[:, 0, ...]), []
        for t in range(x.shape[1]):
            spikes, state = self.neuron(self, state, y[:, t, ...])
            made.append(spikes)
        found = torch.stack(made, dim=1)
        return (found + x if self.added else found).transpose(0, 1)


class Columns(nn.Module):
    """A norm whose weight and bias, and a neuron whose leak, are columns of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 5, 3, padding=1, bias=False)
        self.columns = nn.Parameter(torch.tensor([1.2, 0.3, 0.4]) + 0.1 * torch.rand(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, leak = self.columns.unbind(1)
        y = functional.batch_norm(self.conv(x.flatten(0, 1)), None, None, weight, bias, True)
        v, made = torch.zeros_like(y[: x.shape[1]]), []
        for now in y.unflatten(0, x.shape[:2]):
            v = v * leak.view(-1, 1, 1) + now
            made.append(Spike.apply(v - 1.0))
            v = v - made[-1].detach()
        return torch.stack(made)
