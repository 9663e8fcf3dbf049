"""`snnpart profile` on a GPU: kernels of a captured step are known by their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from snnpart.profile import profile
from tests.gpu import jobs_execution as gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
KNOWN = ("fused neuron forward", "fused neuron backward", "optimizer")


def test_kernels_of_a_captured_step_are_told_apart(tmp_path: Path) -> None:
    x, _ = gpu.batch(0)
    trace = tmp_path / "step.json"
    text = profile(gpu.make_net(), (x,), {"input_layout": "NCHW", "time_steps": 2}, precision="bf16", trace=trace)
    lines = {line[:32].strip(): line[32:].split() for line in text[text.index("beyond it") :].splitlines()[1:]}
    assert "uncaptured" not in text and trace.exists()
    assert all(float(lines[name][0]) > 0 for name in KNOWN), text
    assert sum(float(numbers[0]) for name, numbers in lines.items() if name.startswith("convolution")) > 0, text
    kernels = sum(float(numbers[0]) for name, numbers in lines.items() if name != "gaps")
    assert float(lines.get("other kernels", ["0"])[0]) < 0.25 * kernels, text
