"""The text of a kernel is written when its step first runs in a form, not at every call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from snnpart import parallelize
from snnpart.ops_fused import FusedNeuron
from snnpart.runtime.kernels import neuron_code
from snnpart.runtime.kernels.neuron_code import Form, backward_source, forward_source
from tests.gpu import jobs_execution as gpu


def recorded_step() -> tuple[Any, Form]:
    """A LIF neuron's step and a form to run it in."""
    x, _ = gpu.batch(0)
    program = parallelize(gpu.make_net(), example_inputs=x, input_layout="NCHW", time_steps=2, verify="off", fuse=True)
    fused = next(n.target for n in program.compiled.stages[0, 0].graph.nodes if isinstance(n.target, FusedNeuron))
    step: Any = fused.recorded
    count = len(step.parameters)
    return step, Form(fused.steps, True, True, True, False, (False,) * count, (True,) * count)


def test_texts_are_written_once_for_a_step_and_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    step, form = recorded_step()
    written = []

    def counted(*args: Any) -> Any:
        written.append(args)
        return write_step(*args)

    write_step = neuron_code.write_step
    monkeypatch.setattr(neuron_code, "write_step", counted)
    forward, backward = forward_source(step, form), backward_source(step, form, write=True, reduce=False)
    assert written
    written.clear()
    assert forward_source(step, form) is forward
    assert backward_source(step, form, write=True, reduce=False) is backward
    assert written == []


def test_another_form_has_another_text() -> None:
    step, form = recorded_step()
    assert forward_source(step, replace(form, residual=True)) != forward_source(step, form)
    texts = {backward_source(step, form, write=write, reduce=True) for write in (True, False)}
    assert len(texts) == 2
