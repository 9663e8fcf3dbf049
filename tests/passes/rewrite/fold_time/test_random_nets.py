"""Random small loop networks: feed-forward, skip, late, recurrent, mixed norms, every way in and out."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.passes.rewrite.fold_time.nets import Layer, RandomLoop, Shape
from tests.passes.rewrite.fold_time.parity import active, check

_LAYERS = st.builds(
    Layer,
    norm=st.sampled_from(["none", "batch", "layer", "group", "by hand"]),
    reset=st.sampled_from(["soft", "hard", "none"]),
    begin=st.sampled_from(["none", "zero", "zeros"]),
    skip=st.sampled_from(["none", "none", "add", "cat", "late"]),
    feedback=st.booleans(),
)
SHAPES = st.builds(
    Shape,
    layers=st.lists(_LAYERS, min_size=1, max_size=3).map(tuple),
    source=st.sampled_from(["constant", "batch-first", "time-first", "unbind", "reversed", "delayed", "held"]),
    readout=st.sampled_from(["sum", "mean", "stack", "stack-last-dim", "cat", "last", "list", "max", "membranes"]),
    steps=st.integers(1, 5),
)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(shape=SHAPES)
def test_folded_computes_what_the_loop_computes(shape: Shape) -> None:
    torch.manual_seed(len(shape.layers) + shape.steps)
    net = active(RandomLoop(shape))
    check(net, net.input(), fires=False, **net.dims())
