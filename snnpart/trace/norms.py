"""Norms that keep running statistics.

BatchNorm is one node, `ops.batch_norm`, that holds for training and eval mode. The layer's running statistics must be
tensors of the network: the node updates them where they are.

InstanceNorm in training is what torch's kernel does, written out: the norm without statistics, and writes into the
running ones. They move towards the mean over the batch of every sample's statistics.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from snnpart import ops
from snnpart.compat import InstanceNormBase
from snnpart.trace.cells import Call, How
from snnpart.trace.flags import TrainingFlag
from snnpart.trace.recorder import Recorder


def record_batch_norm(
    recorder: Recorder, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
    running_var: Tensor | None, count: Tensor | None, training: TrainingFlag | bool, momentum: float | None, eps: float,
) -> Tensor:  # fmt: skip
    """Record one `ops.batch_norm` and return its result. Arguments as there; `x` [N, C, ...]."""
    given = (x, weight, bias, running_mean, running_var, count)
    with recorder.pause():
        fakes = [None if tensor is None else recorder.fake(tensor) for tensor in given]
        _check_statistics(recorder, fakes[3:])
        value = training.value if isinstance(training, TrainingFlag) else bool(training)
        out = _infer(recorder, fakes, value or running_mean is None)
        inputs = [tensor for tensor in fakes if tensor is not None]
        detached = not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        call = Call(How("batch_norm", (), {}), inputs, out, detached)
        recorder.emit("call_function", ops.batch_norm, (*fakes, training, momentum, eps), {}, call)
    return out


def _check_statistics(recorder: Recorder, statistics: list[Tensor | None]) -> None:
    if any(tensor is not None and recorder.node(tensor).op != "get_attr" for tensor in statistics):
        raise recorder.error(
            "the running statistics of a batch norm are not buffers of a module, or were written in forward",
            "register them as buffers and let the batch norm alone update them",
        )


def _infer(recorder: Recorder, fakes: list[Tensor | None], use_batch: bool) -> Tensor:
    """The result's shape, type and gradient; no running statistics are written."""
    x, weight, bias, mean, var, _ = fakes
    assert x is not None
    with recorder.fakes:
        if use_batch:
            return F.batch_norm(x, None, None, weight, bias, True)
        return F.batch_norm(x, mean, var, weight, bias, False)


def instance_norm_updating(module: InstanceNormBase, x: Tensor) -> Tensor:
    """The forward of an instance norm in training that tracks statistics; to be run while it is recorded.

    Args:
        module: with `running_mean` and `running_var`.
        x: [N, C, ...].
    """
    mean, var = module.running_mean, module.running_var
    assert mean is not None and var is not None
    out = F.instance_norm(x, None, None, module.weight, module.bias, True, 0.0, module.eps)
    with torch.no_grad():
        seen, dims = x.detach().to(mean.dtype), tuple(range(2, x.dim()))
        mean.lerp_(seen.mean(dims).mean(0), module.momentum or 0.0)
        var.lerp_(seen.var(dims).mean(0), module.momentum or 0.0)
    return out
