"""B03, B06: Spikformer and QKFormer."""

from __future__ import annotations

import torch
from spikingjelly.activation_based import neuron, surrogate
from torch import Tensor, nn


def lif(threshold: float = 1.0) -> nn.Module:
    return neuron.LIFNode(
        tau=2.0, v_threshold=threshold, surrogate_function=surrogate.ATan(), detach_reset=True, step_mode="m"
    )


class TokenUnit(nn.Module):
    """Linear, BatchNorm over the transposed token axis, neuron: [T, B, N, C] -> [T, B, N, out]."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.linear, self.bn, self.lif = nn.Linear(wide, out), nn.BatchNorm1d(out), lif()

    def forward(self, x: Tensor) -> Tensor:
        T, B, N, C = x.shape
        y = self.linear(x.flatten(0, 1))
        y = self.bn(y.transpose(-1, -2)).transpose(-1, -2).reshape(T, B, N, -1).contiguous()
        out: Tensor = self.lif(y)
        return out


class SpikingAttention(nn.Module):
    """Heads without softmax: (q k^T) v, scaled, through a neuron of half threshold."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, 0.5
        self.q, self.k, self.v = TokenUnit(dim, dim), TokenUnit(dim, dim), TokenUnit(dim, dim)
        self.attn_lif, self.proj = lif(0.5), TokenUnit(dim, dim)

    def split(self, x: Tensor) -> Tensor:
        T, B, N, C = x.shape
        return x.reshape(T, B, N, self.heads, C // self.heads).permute(0, 1, 3, 2, 4).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        T, B, N, C = x.shape
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        attn = (q @ k.transpose(-2, -1)) * self.scale
        x = (attn @ v).transpose(2, 3).reshape(T, B, N, C).contiguous()
        out: Tensor = self.proj(self.attn_lif(x))
        return out


class Block(nn.Module):
    """Residuals of spikes; two norms that are built and never used."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SpikingAttention(dim, heads)
        self.mlp = nn.Sequential(TokenUnit(dim, 2 * dim), TokenUnit(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Patches(nn.Module):
    """Two convolutions with pooling after the second, and a positional convolution: [T, B, C, H, W] -> [T, B, N, C]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.lif1 = nn.Conv2d(3, dim // 2, 3, 1, 1, bias=False), nn.BatchNorm2d(dim // 2), lif()
        self.conv2, self.bn2, self.lif2 = nn.Conv2d(dim // 2, dim, 3, 1, 1, bias=False), nn.BatchNorm2d(dim), lif()
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.rpe, self.rpe_bn, self.rpe_lif = nn.Conv2d(dim, dim, 3, 1, 1, bias=False), nn.BatchNorm2d(dim), lif()

    def forward(self, x: Tensor) -> Tensor:
        T, B, C, H, W = x.shape
        y = self.bn1(self.conv1(x.flatten(0, 1))).reshape(T, B, -1, H, W).contiguous()
        y = self.lif1(y).flatten(0, 1).contiguous()
        y = self.bn2(self.conv2(y)).reshape(T, B, -1, H, W).contiguous()
        y = self.pool(self.lif2(y).flatten(0, 1).contiguous())
        feat = y.reshape(T, B, -1, H // 2, W // 2).contiguous()
        pos = self.rpe_bn(self.rpe(y)).reshape(T, B, -1, H // 2, W // 2).contiguous()
        return (self.rpe_lif(pos) + feat).flatten(-2).transpose(-1, -2)


class Spikformer(nn.Module):
    """[N, 3, 8, 8] -> [N, 5]. The blocks are a list under a name set by a string."""

    def __init__(self, dim: int = 12, heads: int = 3, depth: int = 2, steps: int = 2) -> None:
        super().__init__()
        self.T = steps
        self.drop_path = [rate.item() for rate in torch.linspace(0, 0.1, depth)]
        setattr(self, "patch_embed", Patches(dim))  # noqa: B010
        setattr(self, "block", nn.ModuleList(Block(dim, heads) for _ in range(depth)))  # noqa: B010
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = (x.unsqueeze(0)).repeat(self.T, 1, 1, 1, 1)
        blocks, embed = getattr(self, "block"), getattr(self, "patch_embed")  # noqa: B009
        x = embed(x)
        for block in blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(2).mean(0))
        return out


class ChannelUnit(nn.Module):
    """1x1 convolution, BatchNorm, neuron over [T, B, C, N]."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.conv, self.bn, self.lif = nn.Conv1d(wide, out, 1, bias=False), nn.BatchNorm1d(out), lif()

    def forward(self, x: Tensor) -> Tensor:
        T, B = x.shape[:2]
        y = self.bn(self.conv(x.flatten(0, 1)))
        out: Tensor = self.lif(y.reshape(T, B, -1, y.shape[-1]))
        return out


class TokenQK(nn.Module):
    """q is summed over a head's channels, fires, and masks k."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.proj, self.attn_lif = (
            ChannelUnit(dim, dim),
            ChannelUnit(dim, dim),
            ChannelUnit(dim, dim),
            lif(0.5),
        )

    def forward(self, x: Tensor) -> Tensor:
        T, B, C, H, W = x.shape
        x = x.flatten(3)
        q = self.q(x).unsqueeze(2).reshape(T, B, self.heads, C // self.heads, H * W)
        k = self.k(x).unsqueeze(2).reshape(T, B, self.heads, C // self.heads, H * W)
        mask = self.attn_lif(torch.sum(q, dim=3, keepdim=True))
        x = self.proj(torch.mul(mask, k).flatten(2, 3))
        return x.reshape(T, B, C, W, H)


class QKBlock(nn.Module):
    """It leaves with height and width exchanged, which shows only where they differ."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn, self.up, self.down = TokenQK(dim, heads), ChannelUnit(dim, 2 * dim), ChannelUnit(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        T, B, C, H, W = x.shape
        x = x.reshape(T, B, C, W, H) + self.attn(x)
        T, B, C, H, W = x.shape
        return x.reshape(T, B, C, W, H) + self.down(self.up(x.flatten(3))).reshape(T, B, C, W, H)


class TwoBranches(nn.Module):
    """Patch embedding: pooled before the neuron on one branch, a strided 1x1 convolution on the other."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.conv, self.bn, self.pool, self.lif = (
            nn.Conv2d(wide, out, 3, 1, 1),
            nn.BatchNorm2d(out),
            nn.MaxPool2d(2),
            lif(),
        )
        self.res, self.res_bn, self.res_lif = nn.Conv2d(wide, out, 1, 2, bias=False), nn.BatchNorm2d(out), lif()

    def forward(self, x: Tensor) -> Tensor:
        T, B, C, H, W = x.shape
        flat = x.flatten(0, 1)
        y = self.pool(self.bn(self.conv(flat))).reshape(T, B, -1, H // 2, W // 2)
        z = self.res_bn(self.res(flat)).reshape(T, B, -1, H // 2, W // 2)
        out: Tensor = self.lif(y) + self.res_lif(z)
        return out


class QKFormer(nn.Module):
    """[N, 3, H, W] -> [N, 5] over three resolutions."""

    def __init__(self, dim: int = 6, heads: int = 2, steps: int = 2) -> None:
        super().__init__()
        self.T = steps
        self.embed1, self.stage1 = TwoBranches(3, dim), QKBlock(dim, heads)
        self.embed2, self.stage2 = TwoBranches(dim, 2 * dim), QKBlock(2 * dim, heads)
        self.embed3, self.stage3 = TwoBranches(2 * dim, 4 * dim), Block(4 * dim, heads)
        self.head = nn.Linear(4 * dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0).repeat(self.T, 1, 1, 1, 1)
        x = self.stage2(self.embed2(self.stage1(self.embed1(x))))
        x = self.stage3(self.embed3(x).flatten(3).transpose(-1, -2))
        out: Tensor = self.head(x.mean(2)).mean(0)
        return out
