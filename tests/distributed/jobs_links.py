"""What the ranks do in the test of measured links."""

from __future__ import annotations

import torch.distributed as dist

from snnpart.costs import Link
from snnpart.runtime.collectives import Axis
from snnpart.runtime.links import measure_link


def measured() -> Link:
    axis = Axis(dist.group.WORLD, dist.get_rank(), tuple(range(dist.get_world_size())))
    return measure_link(axis, sizes=(1 << 10, 1 << 16, 1 << 22), repeats=3)
