"""The network of the SpikeLM rows as plain torch: a causal transformer whose projections read bi-directional spikes.

Xing et al. 2024: what a LayerNorm answers goes through an elastic bi-spiking neuron before attention and before
the MLP; spikes are -a, 0 or a. Positions are rotary, embedding and output weights are not shared, logits are the mean
over T. With 24 layers, 2048 channels, 16 heads, 8192 hidden ones and 50304 tokens it has 1.41 billion parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    layers: int = 24
    channels: int = 2048
    heads: int = 16
    hidden: int = 8192
    vocabulary: int = 50304
    tokens: int = 128
    time_steps: int = 4


SMALL = Sizes(layers=2, channels=32, heads=4, hidden=64, vocabulary=96, tokens=8, time_steps=2)


class BiSpike(nn.Module):
    """Currents [T, ...] -> spikes [T, ...] in {-a, 0, a}; rounding passes the gradient of what it rounds."""

    def __init__(self, time_steps: int, decay: float = 0.25, amplitude: float = 1.0) -> None:
        super().__init__()
        self.time_steps, self.decay, self.amplitude = time_steps, decay, amplitude

    def forward(self, currents: Tensor) -> Tensor:
        membrane = currents[0]
        spikes: list[Tensor] = []
        for step in range(self.time_steps):
            if step:
                membrane = membrane * self.decay * (self.amplitude - spikes[-1].detach()) + currents[step]
            level = (membrane / self.amplitude).clamp(-1.0, 1.0)
            spikes.append(((level.round() - level).detach() + level) * self.amplitude)
        return torch.stack(spikes)


class Attention(nn.Module):
    """Causal attention over the tokens of [T, B, S, H]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.width = sizes.heads, sizes.channels // sizes.heads
        self.qkv = nn.Linear(sizes.channels, 3 * sizes.channels)
        self.proj = nn.Linear(sizes.channels, sizes.channels)
        rates = 10000.0 ** (-torch.arange(0, self.width, 2) / self.width)
        angles = torch.arange(sizes.tokens)[:, None] * rates
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos.to(x.dtype) + torch.cat([-second, first], dim=-1) * self.sin.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        steps, batch, tokens, channels = x.shape
        mixed = self.qkv(x).reshape(steps * batch, tokens, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        q, k, v = mixed[0], mixed[1], mixed[2]
        seen = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        return self.proj(seen.transpose(1, 2).reshape(steps, batch, tokens, channels))


class Block(nn.Module):
    """Spiking attention and spiking MLP, each around a residual path."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(sizes.channels), nn.LayerNorm(sizes.channels)
        self.spike1, self.spike2 = BiSpike(sizes.time_steps), BiSpike(sizes.time_steps)
        self.attention = Attention(sizes)
        self.fc1, self.fc2 = nn.Linear(sizes.channels, sizes.hidden), nn.Linear(sizes.hidden, sizes.channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.spike1(self.norm1(x)))
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.spike2(self.norm2(x)))))
        return out


class SpikeLM(nn.Module):
    """Tokens [B, S] -> logits [B, S, vocabulary]."""

    def __init__(self, sizes: Sizes = Sizes()) -> None:
        super().__init__()
        self.time_steps = sizes.time_steps
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.channels)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.channels)
        self.head = nn.Linear(sizes.channels, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).unsqueeze(0).repeat(self.time_steps, 1, 1, 1)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)).mean(0)
        return out
