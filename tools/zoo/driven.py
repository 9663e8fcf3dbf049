"""B04, B05: spike-driven transformers, with spikes of SpikingJelly and with integer spikes of plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Hook = dict[str, Tensor] | None


def lif(threshold: float = 1.0) -> nn.Module:
    from spikingjelly.activation_based import neuron, surrogate

    return neuron.LIFNode(
        tau=2.0, v_threshold=threshold, surrogate_function=surrogate.ATan(), detach_reset=True, step_mode="m"
    )


class Unit(nn.Module):
    """Neuron, then convolution and BatchNorm (membrane shortcut); spikes go into the hook."""

    def __init__(self, name: str, wide: int, out: int, kernel: int = 1, threshold: float = 1.0) -> None:
        super().__init__()
        self.name = name
        self.lif, self.conv, self.bn = lif(threshold), nn.Conv2d(wide, out, kernel, 1, kernel // 2), nn.BatchNorm2d(out)

    def forward(self, x: Tensor, hook: Hook = None) -> tuple[Tensor, Hook]:
        T, B, C, H, W = x.shape
        x = self.lif(x)
        if hook is not None:
            hook[self.name + "_lif"] = x.detach()
        x = self.bn(self.conv(x.flatten(0, 1))).reshape(T, B, -1, H, W).contiguous()
        return x, hook


class Attention(nn.Module):
    """kv is summed over the tokens and fires; q is masked by it. A talking-heads convolution is never used."""

    def __init__(self, name: str, dim: int, heads: int) -> None:
        super().__init__()
        self.name, self.heads = name, heads
        self.shortcut_lif = lif()
        self.q, self.k, self.v = (nn.Conv2d(dim, dim, 1, bias=False) for _ in range(3))
        self.q_bn, self.k_bn, self.v_bn = (nn.BatchNorm2d(dim) for _ in range(3))
        self.q_lif, self.k_lif, self.v_lif, self.talking_heads_lif = lif(), lif(), lif(), lif(0.5)
        self.talking_heads = nn.Conv1d(heads, heads, 1, bias=False)
        self.proj, self.proj_bn = nn.Conv2d(dim, dim, 1), nn.BatchNorm2d(dim)

    def project(self, x: Tensor, conv: nn.Module, bn: nn.Module, fire: nn.Module) -> Tensor:
        T, B, C, H, W = x.shape
        y = fire(bn(conv(x.flatten(0, 1))).reshape(T, B, C, H, W).contiguous())
        return y.flatten(3).transpose(-1, -2).reshape(T, B, H * W, self.heads, C // self.heads).permute(0, 1, 3, 2, 4)

    def forward(self, x: Tensor, hook: Hook = None) -> tuple[Tensor, Tensor, Hook]:
        T, B, C, H, W = x.shape
        identity = x
        x = self.shortcut_lif(x)
        q = self.project(x, self.q, self.q_bn, self.q_lif)
        k = self.project(x, self.k, self.k_bn, self.k_lif)
        v = self.project(x, self.v, self.v_bn, self.v_lif)
        kv = self.talking_heads_lif(k.mul(v).sum(dim=-2, keepdim=True))
        if hook is not None:
            hook[self.name + "_kv"] = kv.detach()
        x = q.mul(kv).transpose(3, 4).reshape(T, B, C, H, W).contiguous()
        x = self.proj_bn(self.proj(x.flatten(0, 1))).reshape(T, B, C, H, W).contiguous()
        return x + identity, v, hook


class Block(nn.Module):
    def __init__(self, name: str, dim: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(name + "_attn", dim, heads)
        self.fc1, self.fc2 = Unit(name + "_fc1", dim, 2 * dim), Unit(name + "_fc2", 2 * dim, dim)

    def forward(self, x: Tensor, hook: Hook = None) -> tuple[Tensor, Tensor, Hook]:
        x, v, hook = self.attn(x, hook=hook)
        y, hook = self.fc1(x, hook=hook)
        y, hook = self.fc2(y, hook=hook)
        return x + y, v, hook


class Embed(nn.Module):
    """Convolution, BatchNorm, pooling (of the 5-D tensor for event data), neuron, positional convolution."""

    def __init__(self, wide: int, dim: int, events: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.lif = nn.Conv2d(wide, dim, 3, 1, 1, bias=False), nn.BatchNorm2d(dim), lif()
        self.events = events
        self.pool = nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)) if events else nn.MaxPool2d(3, 2, 1)
        self.rpe = Unit("rpe", dim, dim, 3, threshold=0.4)

    def forward(self, x: Tensor, hook: Hook = None) -> tuple[Tensor, Hook]:
        T, B, C, H, W = x.shape
        y = self.bn(self.conv(x.flatten(0, 1)))
        if self.events:
            y = self.pool(y.reshape(T, B, -1, H, W).permute(1, 2, 0, 3, 4)).permute(2, 0, 1, 3, 4).contiguous()
        else:
            y = self.pool(y).reshape(T, B, -1, H // 2, W // 2).contiguous()
        y = self.lif(y)
        if hook is not None:
            hook["embed_lif"] = y.detach()
        z, hook = self.rpe(y, hook=hook)
        return z + y, hook


class SpikeDriven(nn.Module):
    """A still image [N, 3, H, W] or frames [N, T, 2, H, W] -> ([N, 5] or, under TET, [T, N, 5], the hook)."""

    def __init__(self, wide: int = 3, dim: int = 8, heads: int = 2, steps: int = 2, tet: bool = False) -> None:
        super().__init__()
        self.T, self.TET = steps, tet
        self.patch_embed = Embed(wide, dim, events=wide == 2)
        self.block = nn.ModuleList(Block(f"block{i}", dim, heads) for i in range(2))
        self.head_lif, self.head = lif(), nn.Linear(dim, 5)

    def forward(self, x: Tensor, hook: Hook = None) -> tuple[Tensor, Hook]:
        if len(x.shape) < 5:
            x = (x.unsqueeze(0)).repeat(self.T, 1, 1, 1, 1)
        else:
            x = x.transpose(0, 1).contiguous()
        x, hook = self.patch_embed(x, hook=hook)
        for block in self.block:
            x, _, hook = block(x, hook=hook)
        x = self.head_lif(x.flatten(3).mean(3))
        if hook is not None:
            hook["head_lif"] = x.detach()
        x = self.head(x)
        return (x if self.TET else x.mean(0)), hook


class Hooked(nn.Module):
    """The same network asked for its spikes: [N, 3, H, W] -> ([N, 5], dict of spikes)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SpikeDriven()

    def forward(self, x: Tensor) -> tuple[Tensor, Hook]:
        out: tuple[Tensor, Hook] = self.net(x, hook={})
        return out


class Integer(torch.autograd.Function):
    """Rounds to 0..4; the gradient passes within the range."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor, top: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.top = top
        return torch.round(torch.clamp(x, 0, top))

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * ((x >= 0) & (x <= ctx.top)).to(grads[0].dtype), None


class MultiSpike(nn.Module):
    is_neuron = True

    def __init__(self, top: float = 4.0) -> None:
        super().__init__()
        self.top, self.fire = top, Integer.apply

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fire(x * self.top, self.top) / self.top  # type: ignore[no-untyped-call]
        return out


class PaddedNorm(nn.Module):
    """BatchNorm whose border is what the norm makes of zero, by its running statistics."""

    def __init__(self, pad: int, channels: int) -> None:
        super().__init__()
        self.pad, self.bn = pad, nn.BatchNorm2d(channels)

    @property
    def weight(self) -> Tensor:
        return self.bn.weight

    @property
    def bias(self) -> Tensor:
        return self.bn.bias

    @property
    def running_mean(self) -> Tensor | None:
        return self.bn.running_mean

    @property
    def running_var(self) -> Tensor | None:
        return self.bn.running_var

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(x)
        mean, variance = self.running_mean, self.running_var
        assert mean is not None and variance is not None
        border = self.bias.detach() - mean * self.weight.detach() / torch.sqrt(variance + self.bn.eps)
        n, c, h, w = y.shape
        p = self.pad
        out = border.view(1, -1, 1, 1).repeat(n, 1, h + 2 * p, w + 2 * p)
        out[:, :, p : p + h, p : p + w] = y
        return out


class RepConv(nn.Module):
    """1x1, norm that pads, depthwise 3x3 and 1x1, norm."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(wide, wide, 1, bias=False),
            PaddedNorm(1, wide),
            nn.Sequential(
                nn.Conv2d(wide, wide, 3, groups=wide, bias=False),
                nn.Conv2d(wide, out, 1, bias=False),
                nn.BatchNorm2d(out),
            ),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class SepConv(nn.Module):
    """Pointwise up, 7x7 depthwise, pointwise down, each behind integer spikes."""

    def __init__(self, dim: int, ratio: int = 2) -> None:
        super().__init__()
        wide = dim * ratio
        self.spike1, self.pw1, self.bn1 = MultiSpike(), nn.Conv2d(dim, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.spike2, self.dw = MultiSpike(), nn.Conv2d(wide, wide, 7, padding=3, groups=wide, bias=False)
        self.pw2, self.bn2 = nn.Conv2d(wide, dim, 1, bias=False), nn.BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dw(self.spike2(self.bn1(self.pw1(self.spike1(x)))))
        out: Tensor = self.bn2(self.pw2(y)) + x
        return out


class MetaAttention(nn.Module):
    """q, k, v by RepConv; k^T v first, then q."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.spike = MultiSpike()
        self.q, self.k, self.v, self.proj = (RepConv(dim, dim) for _ in range(4))
        self.q_spike, self.k_spike, self.v_spike, self.attn_spike = (MultiSpike() for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        return x.flatten(2).transpose(-1, -2).reshape(B, H * W, self.heads, C // self.heads).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        x = self.spike(x)
        q = self.split(self.q_spike(self.q(x)))
        k, v = self.split(self.k_spike(self.k(x))), self.split(self.v_spike(self.v(x)))
        y = (q @ (k.transpose(-2, -1) @ v) * self.scale).transpose(2, 3).reshape(B, C, H, W)
        out: Tensor = self.proj(self.attn_spike(y))
        return out


class MetaFormer(nn.Module):
    """[N, 3, 16, 16] -> [N, 5]: convolutional stages, then a transformer; widths 6, 10, 15."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_bn, self.conv1 = nn.Conv2d(3, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), SepConv(6)
        self.spike1, self.down1, self.down1_bn = MultiSpike(), nn.Conv2d(6, 10, 3, 2, 1, bias=False), nn.BatchNorm2d(10)
        self.conv2, self.spike2 = SepConv(10), MultiSpike()
        self.down2, self.down2_bn = nn.Conv2d(10, 15, 3, 1, 1, bias=False), nn.BatchNorm2d(15)
        self.attn, self.spike3, self.mlp = MetaAttention(15, 3), MultiSpike(), nn.Conv2d(15, 15, 1)
        self.head_spike, self.head = MultiSpike(), nn.Linear(15, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.stem_bn(self.stem(x)))
        x = self.conv2(self.down1_bn(self.down1(self.spike1(x))))
        x = self.down2_bn(self.down2(self.spike2(x)))
        x = x + self.attn(x)
        x = x + self.mlp(self.spike3(x))
        out: Tensor = self.head(self.head_spike(x.flatten(2).mean(2)))
        return out
