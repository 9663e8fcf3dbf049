"""Random loop networks that take some of their steps at a time, on one rank and with channels over two."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snnpart import parallelize
from snnpart.errors import ConfigError
from snnpart.ops_time import Loop
from tests.passes.rewrite.fold_time.nets import RandomLoop, Shape
from tests.passes.rewrite.fold_time.parity import active
from tests.passes.rewrite.fold_time.test_random_nets import SHAPES

_LAYOUT = {"constant": "NF", "time-first": "TNF", "unbind": "TNF"}
_taken = {1: 0, 2: 0}


@settings(max_examples=16, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(shape=SHAPES, more=st.integers(2, 4), together=st.integers(1, 3), tp=st.sampled_from([1, 2]))
def _check(shape: Shape, more: int, together: int, tp: int) -> None:
    """The program is compared with the module as it compiles: outputs, gradients, buffers."""
    shape = replace(shape, steps=shape.steps + more)
    torch.manual_seed(len(shape.layers) + shape.steps)
    net = active(RandomLoop(shape))
    options = {"example_inputs": net.input(4), "input_layout": _LAYOUT.get(shape.source, "NTF"), "tp": tp}
    try:
        program = parallelize(net, fold=together, verify="full", **options)
    except ConfigError as error:
        assert f"fold={together}: " in str(error)
        return
    loops = [n.target for s in program.compiled.stages.values() for n in s.graph.nodes if isinstance(n.target, Loop)]
    some = sum(loop.together == together for loop in loops)
    assert some == (tp if program.plan.fold else 0)
    _taken[tp] += bool(some)


def test_rounds_compute_what_the_loop_computes() -> None:
    _check()
    assert min(_taken.values()) >= 3
