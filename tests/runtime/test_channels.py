"""Wire types: what was seen of a graph is forgotten with it."""

from __future__ import annotations

import gc

import torch

from snnpart.runtime.channels import WireTypes
from tests.distributed.handmade import compile_by_hand, make_net


def test_types_of_a_dropped_graph_are_forgotten() -> None:
    types, program = WireTypes(seen=True), compile_by_hand(make_net(), pp=2)
    first, second = program.stage(0, 0), program.stage(1, 0)
    types.learn(first, "sends", (torch.bfloat16, torch.bool))
    types.learn(second, "receives", (torch.bfloat16, torch.bool))
    assert types.of(first, "sends") == (torch.bfloat16, torch.bool)
    assert types.of(first, "receives") is None
    del program, first
    gc.collect()
    assert len(types._known) == 1 and types.of(second, "receives") is not None
