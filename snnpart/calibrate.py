"""Efficiencies of this machine by kind of operation, measured once and kept.

`costs.measured_profile` knows four rates. How far a convolution, a norm or an element-wise operation stays below them
depends on the library as much as on the machine, so a network with each of them runs once on a clock
(`snnpart.measure`), and what it took over what the rates say becomes the profile's `scales`. They are kept in the
user's cache beside the rates. For a plan that matters, measure the network itself: `ParallelProgram.measured_profile`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from snnpart.costs import MachineProfile, kept_profile, measured_profile
from snnpart.measure import with_kernels
from snnpart.pass_manager import PassManager
from snnpart.passes import ANALYZE, REWRITE
from snnpart.trace import trace

STEPS, BATCH, SIZE, CHANNELS = 4, 8, 16, 64


class Spike(torch.autograd.Function):
    """A threshold at 0 of x of any shape; backward the fast sigmoid's slope, 1 / (1 + 2 |x|)^2."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return (u >= 0).to(u)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (u,) = ctx.saved_tensors
        return grads[0] / (1 + (2 * u).abs()) ** 2


class Reference(nn.Module):
    """Every kind of operation that takes time in a spiking network, at sizes that are common: [T*N, C, H, W] in."""

    def __init__(self, channels: int = CHANNELS) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.point = nn.Conv2d(channels, channels, 1)
        self.qkv, self.norm = nn.Linear(channels, 3 * channels), nn.LayerNorm(channels)
        self.head = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = Spike.apply(norm(conv(x))) + x  # type: ignore[no-untyped-call]
        x = F.avg_pool2d(F.max_pool2d(F.relu(self.point(x)), 2), 2)
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        q, k, v = self.qkv(tokens).chunk(3, -1)
        tokens = (q @ k.transpose(1, 2)).softmax(-1) @ v
        scores: Tensor = self.head(tokens.mean(1)).sigmoid()
        return scores


def calibrated_profile(device: str | torch.device = "cpu", *, again: bool = False) -> MachineProfile:
    """The measured profile of this machine's `device` with efficiencies by kind of operation.

    Read from the user's cache where it is there, else measured in a few seconds and kept. Ranks that must agree on a
    plan take the one of the first.
    """
    profile = measured_profile(device, again=again)
    if not profile.scales:
        profile = kept_profile(with_scales(profile, device), device)
    return profile


def with_scales(profile: MachineProfile, device: str | torch.device = "cpu") -> MachineProfile:
    """The profile with what a reference network took over what its rates say, by kind of operation."""
    model = Reference().to(device).train()
    images = torch.rand(STEPS * BATCH, CHANNELS, SIZE, SIZE, device=device)
    graph = trace(model, images)
    PassManager((*REWRITE, *ANALYZE)).run(graph)
    return replace(profile, scales=with_kernels(profile, graph, images).scales)
