"""nn.Module while tracing: `__call__`, `training`, BatchNorm and autocast are patched, and restored on leaving.

- `__call__` keeps the path of the running module and records leaves as `call_module`.
- `training` is answered with a `TrainingFlag` (a property of the class goes before the instance's own entry). A module
  that is in another mode than the model (a frozen BatchNorm) keeps its own mode, whatever the program's.
- `MultiheadAttention.forward` is written out as plain operations.
- `_BatchNorm.forward` records one node, also when a framework's subclass calls it through `super()`.
- a function made with `torch.jit.script` runs its Python code: its kernels are called below autograd, where a recorded
  node would have no gradient.
- autocast with enabled=True is refused: the graph's values would have other dtypes than its nodes say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.compat import BatchNormBase, InstanceNormBase, python_of_script
from snnpart.trace.attention import attention
from snnpart.trace.leaves import Modules, call_leaf
from snnpart.trace.norms import instance_norm_updating, record_batch_norm
from snnpart.trace.patches import patched
from snnpart.trace.recorder import Recorder


@contextmanager
def modules_recorded(recorder: Recorder, modules: Modules) -> Iterator[None]:
    """Record calls of modules inside the block."""
    patches: list[tuple[Any, str, Any]] = [
        (nn.Module, "__call__", _call(recorder, modules)),
        (nn.Module, "training", _training(recorder, modules)),
        (BatchNormBase, "forward", _batch_norm(recorder, BatchNormBase.forward)),
        (nn.SyncBatchNorm, "forward", _batch_norm(recorder, nn.SyncBatchNorm.forward)),
        (InstanceNormBase, "_apply_instance_norm", _instance_norm(recorder)),
        (nn.MultiheadAttention, "forward", attention(recorder)),
        (torch.autocast, "__enter__", _autocast(recorder)),
        (torch.jit.ScriptFunction, "__call__", _scripted(recorder)),
        (type(torch.autograd.Variable), "__call__", _variable(recorder)),
    ]
    with patched(patches), modules.guarded():
        yield


def _call(recorder: Recorder, modules: Modules) -> Any:
    original = nn.Module.__call__

    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.paused:
            return original(module, *args, **kwargs)
        path = modules.path(module, recorder.path[-1])
        recorder.path.append(path)
        try:
            if modules.is_leaf(module):
                return call_leaf(recorder, modules, module, path, args, kwargs)
            return original(module, *args, **kwargs)
        except BaseException as error:
            if recorder.failed is None or recorder.failed[0] is not error:
                recorder.failed = (error, path)
            raise
        finally:
            recorder.path.pop()

    return __call__


def _training(recorder: Recorder, modules: Modules) -> property:
    def get(module: nn.Module) -> Any:
        own = vars(module).get("training")
        if own is None:
            return module.__getattr__("training")
        if recorder.paused or modules.is_leaf(module) or _ignores_mode(module):
            return own
        if own != modules.training:
            path, mode = modules.path(module, recorder.path[-1]), "training" if own else "eval"
            recorder.assume("mode", f"module '{path}' stays in {mode} mode, as it is in the model")
            return own
        return recorder.flag()

    def set_(module: nn.Module, value: bool) -> None:
        if not recorder.paused and vars(module).get("training", value) != value:
            raise recorder.error(
                "forward switches a module between training and eval mode", "switch the mode outside forward"
            )
        vars(module)["training"] = value

    return property(get, set_)


def _ignores_mode(module: nn.Module) -> bool:
    """An instance norm without running statistics does the same in both modes, but asks."""
    return isinstance(module, InstanceNormBase) and not module.track_running_stats


def _batch_norm(recorder: Recorder, original: Any) -> Any:
    def forward(module: BatchNormBase, x: Tensor) -> Tensor:
        untracked = not module.track_running_stats and module.running_mean is not None
        if recorder.paused or untracked:
            return original(module, x)
        if isinstance(module, nn.SyncBatchNorm):
            recorder.assume("batch norm", "SyncBatchNorm is taken as BatchNorm over the whole batch")
        else:
            module._check_input_dim(x)
        return record_batch_norm(
            recorder, x, module.weight, module.bias, module.running_mean, module.running_var,
            module.num_batches_tracked, module.training, module.momentum, module.eps,
        )  # fmt: skip

    return forward


def _instance_norm(recorder: Recorder) -> Any:
    original = InstanceNormBase._apply_instance_norm

    def _apply_instance_norm(module: InstanceNormBase, x: Tensor) -> Tensor:
        if recorder.paused or module.running_mean is None or not module.training:
            return original(module, x)
        return instance_norm_updating(module, x)

    return _apply_instance_norm


def _variable(recorder: Recorder) -> Any:
    """`Variable(x)` of old code gives x without its gradient, in a constructor that no mode sees."""

    def __call__(kind: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.paused or len(args) != 1 or not isinstance(args[0], Tensor) or kwargs.get("requires_grad"):
            return type.__call__(kind, *args, **kwargs)
        return args[0].detach()

    return __call__


def _scripted(recorder: Recorder) -> Any:
    original = torch.jit.ScriptFunction.__call__

    def __call__(function: Any, *args: Any, **kwargs: Any) -> Any:
        source = None if recorder.paused else python_of_script(function)
        return original(function, *args, **kwargs) if source is None else source(*args, **kwargs)

    return __call__


def _autocast(recorder: Recorder) -> Any:
    original = torch.autocast.__enter__

    def __enter__(context: Any) -> Any:
        if context._enabled and not recorder.paused:
            raise recorder.error(
                "autocast is switched on inside forward, which is not supported yet",
                "cast with .to(dtype), or use autocast(enabled=False)",
            )
        return original(context)

    return __enter__


def where(recorder: Recorder, error: BaseException) -> str:
    """The module path in which an error was raised."""
    return recorder.failed[1] if recorder.failed is not None and recorder.failed[0] is error else recorder.path[-1]
