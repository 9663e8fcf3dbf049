"""Layers with shared channels, to put a network together by hand: see `snnpart.runtime.channel_layers`."""

from __future__ import annotations

from snnpart.runtime.channel_layers import (
    ChannelShardBatchNorm1d,
    ChannelShardBatchNorm2d,
    ChannelShardBatchNorm3d,
    ChannelShardConv1d,
    ChannelShardConv2d,
    ChannelShardConv3d,
    ChannelShardLinear,
)

__all__ = [
    "ChannelShardBatchNorm1d",
    "ChannelShardBatchNorm2d",
    "ChannelShardBatchNorm3d",
    "ChannelShardConv1d",
    "ChannelShardConv2d",
    "ChannelShardConv3d",
    "ChannelShardLinear",
]
