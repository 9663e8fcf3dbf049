"""`snnpart profile` from a model: compile, run train steps, and say where their time goes beside the roofline.

Like the command line, this knows both the passes, which count the work, and the runtime, which measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from snnpart.api import parallelize
from snnpart.costs import default_profile
from snnpart.passes.analyze.roofline import roofline
from snnpart.runtime.precision import DTYPES
from snnpart.runtime.profile_text import profile_text
from snnpart.runtime.profiling import agreed_machine
from snnpart.runtime.ranks import usable_device


def profile(
    model: nn.Module,
    inputs: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    execution: str = "auto",
    precision: str = "fp32",
    trace: Path | None = None,
) -> str:
    """The text on the first rank, empty on others. Collective, under torchrun.

    Args:
        inputs: a batch of one data-parallel rank; steps are profiled at its size.
        options: keywords of `parallelize`.
        trace: where a Chrome trace is written.
    """
    device = usable_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    low = DTYPES.get(precision)
    machine = agreed_machine(default_profile(), device, low or torch.float32)
    kernels = {"fuse": True, "channels_last": "auto"} if device.type == "cuda" and options.get("plan") is None else {}
    given = {**kernels, **options}
    compiled = parallelize(model, example_inputs=inputs, verify="off", profile=machine, **given).compiled
    least = partial(roofline, compiled, machine, compiled.source.batch, low)
    return profile_text(compiled, inputs, str(device), execution, precision, least=least, trace=trace)
