"""pool-codes: max poolings over images keep a byte a window for backward (`ops_pool`) instead of input and places.

On a GPU `ops_pool.max_pool2d` is two kernels of ours (`runtime.kernels.max_pool`), of which that for backward is
several times faster than torch's with channels last. Done where images lie so (`Plan.channels_last`). A pooling stays
torch's if its windows have gaps (dilation) or more than `ops_pool.LARGEST` places, or its strides step over more, if
the places themselves are asked for, and over anything but images [N, C, H, W] in floating point.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from snnpart import facts, ops_pool
from snnpart.facts import Value

_POOLS = (torch.max_pool2d, F.max_pool2d)


def pool_codes(graph: fx.Graph) -> None:
    """Have the max poolings of a stage graph keep codes, in place."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _POOLS and _applies(node):
            node.target = ops_pool.max_pool2d


def _applies(node: fx.Node) -> bool:
    """Whether the pooling is spelled out, (x, size, stride, padding, dilation, ceil), and one that codes can be of."""
    if len(node.args) != 6 or node.kwargs:
        return False
    window, value = (node.args[1], node.args[2], node.args[4]), facts.get(node, Value)
    images = value is not None and len(value.shape) == 4 and value.dtype.is_floating_point
    return images and all(map(_is_pair, window)) and ops_pool.is_small(*window)  # type: ignore[arg-type]


def _is_pair(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and len(item) == 2 and all(isinstance(n, int) for n in item)
