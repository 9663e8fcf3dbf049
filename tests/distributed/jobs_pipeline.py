"""Pipelines with something wrong in them."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F

from snnpart.runtime.launch import launch
from tests.distributed.handmade import compile_by_hand, make_net
from tests.distributed.jobs import batch


def claim_spikes() -> None:
    """A real value whose port says that it is 0 or 1."""
    program = compile_by_hand(make_net(), pp=2)
    first, second = program.stage(0, 0), program.stage(1, 0)
    ports = (replace(first.sends[0], states=(0, 2)), *first.sends[1:])
    stages = {(0, 0): replace(first, sends=ports), (1, 0): replace(second, receives=ports)}
    launch(replace(program, stages=stages)).train_step(*batch(0, 4), F.cross_entropy)
