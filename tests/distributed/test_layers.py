"""Layers with shared channels on gloo ranks against the whole layers: outputs, gradients, running statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from snnpart import layers
from snnpart.errors import ConfigError
from tests.distributed.jobs_layers import whole
from tests.distributed.pool import Pool

WHOLE = {"y", "x", "2.bias"}


@pytest.mark.parametrize("kind", ["linear", "conv1", "conv2", "conv3 plain", "conv2 grouped"])
def test_a_block_of_two_layers_equals_one_process(pool: Pool, kind: str) -> None:
    want = whole(kind)
    found = pool.run("tests.distributed.jobs_layers:shared", ranks=2, kind=kind)
    for name, value in want.items():
        parts = [rank[name] for rank in found]
        if name in WHOLE:
            for part in parts:
                torch.testing.assert_close(part.reshape(value.shape), value, rtol=1e-9, atol=1e-9, msg=name)
        else:
            dim = 1 if name == "2.weight" else 0
            torch.testing.assert_close(torch.cat(parts, dim), value, rtol=1e-9, atol=1e-9)
            assert parts[0].shape[dim] - parts[1].shape[dim] in (0, 1, 3), name


def test_alone_they_are_the_layer_itself() -> None:
    conv, x = nn.Conv2d(3, 4, 3, padding=1, groups=1), torch.randn(2, 3, 5, 5)
    for mode in ("colwise", "rowwise"):
        torch.testing.assert_close(layers.ChannelShardConv2d(conv, None, mode=mode)(x), conv(x))  # type: ignore[arg-type]
    norm = nn.BatchNorm2d(3, momentum=None)
    torch.testing.assert_close(layers.ChannelShardBatchNorm2d(norm, None)(x), norm(x))


def test_refusals() -> None:
    conv = nn.Conv2d(4, 4, 1, groups=2)
    with pytest.raises(ConfigError, match="mode='row' is not known"):
        layers.ChannelShardConv2d(conv, None, mode="row")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rowwise with groups=2"):
        layers.ChannelShardConv2d(conv, None, mode="rowwise")
    with pytest.raises(ConfigError, match="ChannelShardConv1d is made from a Conv1d, not a Conv2d"):
        layers.ChannelShardConv1d(conv, None, mode="colwise")
    step = layers.ChannelShardConv2d(conv, None, mode="colwise")
    step.step_mode = "m"
    with pytest.raises(ConfigError, match="takes an input of 5 dims"):
        step(torch.zeros(2, 4, 3, 3))
