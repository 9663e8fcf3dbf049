"""Profiles: whose time it is, forward and backward, and what the command prints."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from snnpart.api import parallelize
from snnpart.cli import app
from snnpart.runtime import profiling, waits
from snnpart.runtime.launch import launch
from tests.gpu import jobs_execution as gpu


def test_time_belongs_to_the_module_that_computes() -> None:
    x, y = gpu.batch(0)
    compiled = parallelize(gpu.make_net(), example_inputs=x, input_layout="NCHW", time_steps=2, verify="off").compiled
    adamw = lambda params: torch.optim.AdamW(params)
    with launch(profiling.marked(compiled), optimizer=adamw, execution="eager") as running:
        step = lambda: running.train_step(x, y, gpu.loss_fn)
        marked = step().item()
        rows = profiling.by_module(step, compiled, torch.device("cpu"))
    with launch(compiled, optimizer=adamw, execution="eager") as running:
        assert running.train_step(x, y, gpu.loss_fn).item() == marked
    found = {row.module: row for row in rows}
    convolutions = [row for name, row in found.items() if name.endswith(("c1", "c2"))]
    assert len(convolutions) == 8
    assert all(row.forward > 0 and row.backward > 0 and row.predicted > 0 for row in convolutions)
    assert found[profiling.OPTIMIZER].total > 0
    elsewhere = found[profiling.OTHER].total if profiling.OTHER in found else 0.0
    assert elsewhere < sum(row.total for row in rows) / 2


def test_overlapping_kernels_count_once() -> None:
    spans = [SimpleNamespace(start=start, end=end) for start, end in ((0, 5), (3, 8), (10, 12), (11, 11.5))]
    assert profiling._union(spans) == pytest.approx(10)
    assert profiling.Whole(step=20, busy=10, communication=0).gaps == pytest.approx(0.5)


def test_a_gpu_waits_where_messages_alone_run() -> None:
    """A receive from 2 to 9 has a kernel beside it until 5, a reduction from 8 on."""
    spans = {"gemm": (0, 5), "ncclDevKernel_SendRecv(x)": (2, 9), "ncclDevKernel_AllReduce": (8, 10)}
    events = [SimpleNamespace(name=k, time_range=SimpleNamespace(start=a, end=b)) for k, (a, b) in spans.items()]
    assert profiling._messages_alone(events) == pytest.approx(3)


def test_waits_are_counted_while_they_are_asked_for() -> None:
    with waits.waiting():
        pass
    with waits.counted() as found:
        assert found == []
        with waits.waiting():
            time.sleep(0.01)
    with waits.waiting():
        pass
    assert len(found) == 1 and 0.009 < found[0] < 1


def test_the_command_prints_step_roofline_modules_and_what_is_beyond_the_roofline(tmp_path: Path) -> None:
    trace = tmp_path / "traces/step.json"
    words = ["profile", "tests.nets:Net", "--input", "float32[2,3,8,8]", "--layout", "NCHW", "--trace", str(trace)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    for word in ("step ", "computing", "gaps", "roofline", "conv1", "(optimizer)"):
        assert word in done.output
    kernels = done.output[done.output.index("beyond it") :]
    for word in ("convolution forward", "convolution backward", "optimizer", "neurons and other operations", "gaps"):
        assert word in kernels
    assert any("aten::" in event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"])
