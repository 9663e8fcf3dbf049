"""nn.Module while tracing: `__call__`, `training`, BatchNorm and autocast are patched, and restored on leaving.

- `__call__` keeps the path of the running module and records leaves as `call_module`.
- `training` is answered with a `TrainingFlag` (a property of the class goes before the instance's own entry).
- `_BatchNorm.forward` records one node, also when a framework's subclass calls it through `super()`.
- autocast with enabled=True is refused: the graph's values would have other dtypes than its nodes say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from snnpart.compat import FakeTensor
from snnpart.frameworks import adapter_for, preserved
from snnpart.graph import LeafInfo
from snnpart.trace.norms import record_batch_norm
from snnpart.trace.recorder import Call, How, Recorder, items_of


class Modules:
    """The modules of the model by identity: path, whether a leaf, and which leaves were called."""

    def __init__(self, model: nn.Module) -> None:
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.called: dict[str, LeafInfo] = {}
        self._leaf: dict[int, bool] = {}

    def is_leaf(self, module: nn.Module) -> bool:
        known = self._leaf.get(id(module))
        if known is None:
            known = self._leaf[id(module)] = adapter_for(module).is_leaf(module)
        return known

    def path(self, module: nn.Module, caller: str) -> str:
        """The module's path; for one that the model does not register, its class under the caller's path."""
        known = self.paths.get(id(module))
        return f"{caller}.{type(module).__name__}".lstrip(".") if known is None else known


@contextmanager
def modules_recorded(recorder: Recorder, modules: Modules) -> Iterator[None]:
    """Record calls of modules inside the block."""
    patches: list[tuple[Any, str, Any]] = [
        (nn.Module, "__call__", _call(recorder, modules)),
        (nn.Module, "training", _training(recorder, modules)),
        (_BatchNorm, "forward", _batch_norm(recorder, _BatchNorm.forward)),
        (nn.SyncBatchNorm, "forward", _batch_norm(recorder, nn.SyncBatchNorm.forward)),
        (torch.autocast, "__enter__", _autocast(recorder)),
    ]
    before = [(owner, name, owner.__dict__.get(name, _batch_norm)) for owner, name, _ in patches]
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is _batch_norm:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _call(recorder: Recorder, modules: Modules) -> Any:
    original = nn.Module.__call__

    def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if recorder.paused:
            return original(module, *args, **kwargs)
        path = modules.path(module, recorder.path[-1])
        recorder.path.append(path)
        try:
            if modules.is_leaf(module):
                return _call_leaf(recorder, modules, module, path, args, kwargs)
            return original(module, *args, **kwargs)
        except BaseException as error:
            if recorder.failed is None or recorder.failed[0] is not error:
                recorder.failed = (error, path)
            raise
        finally:
            recorder.path.pop()

    return __call__


def _call_leaf(
    recorder: Recorder, modules: Modules, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    if id(module) not in modules.paths:
        raise recorder.error(
            f"a {type(module).__name__} is called that the model does not register",
            "make it an attribute of its module, or keep it in an nn.ModuleList or nn.ModuleDict",
        )
    adapter = adapter_for(module)
    inputs: list[Tensor] = []
    args = tuple(_fakes(recorder, arg, inputs) for arg in args)
    kwargs = {key: _fakes(recorder, value, inputs) for key, value in kwargs.items()}
    with recorder.pause():
        out = adapter.infer(module, args, kwargs)
        if out is NotImplemented:
            out = _run(recorder, module, args, kwargs)
        out = _own(out, inputs)
        detached = not torch.is_grad_enabled() and _carries_gradient(module, inputs)
        recorder.emit("call_module", path, args, dict(kwargs), Call(How("", (), {}), inputs, out, detached))
    modules.called.setdefault(path, LeafInfo(path, module, adapter.name, adapter.is_neuron(module)))
    return out


def _carries_gradient(module: nn.Module, inputs: list[Tensor]) -> bool:
    return any(p.requires_grad for p in module.parameters()) or any(t.requires_grad for t in inputs)


def _run(recorder: Recorder, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the leaf returns, from running it on fakes; it is left as it was."""
    with preserved(module), recorder.fakes:
        return module(*args, **kwargs)


def _fakes(recorder: Recorder, value: Any, inputs: list[Tensor]) -> Any:
    """The value with tensors replaced by their fakes, which are added to `inputs`."""
    if isinstance(value, Tensor):
        fake = recorder.fake(value)
        inputs.append(fake)
        return fake
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_fakes(recorder, item, inputs) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_fakes(recorder, item, inputs) for item in value)
    if isinstance(value, dict):
        return {key: _fakes(recorder, item, inputs) for key, item in value.items()}
    return value


def _own(out: Any, inputs: list[Tensor]) -> Any:
    """The leaf's result with tensors of its own where it returns one of its inputs."""
    if isinstance(out, Tensor):
        return out.clone() if any(out is one for one in inputs) or not isinstance(out, FakeTensor) else out
    if isinstance(out, tuple) and hasattr(out, "_fields"):
        return type(out)(*(_own(item, inputs) for item in items_of(out)))
    if isinstance(out, (tuple, list)):
        return type(out)(_own(item, inputs) for item in out)
    if isinstance(out, dict):
        return {key: _own(item, inputs) for key, item in out.items()}
    return out


def _training(recorder: Recorder, modules: Modules) -> property:
    def get(module: nn.Module) -> Any:
        own = vars(module).get("training")
        if own is None:
            return module.__getattr__("training")
        if recorder.paused or modules.is_leaf(module) or _ignores_mode(module):
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
    return isinstance(module, _InstanceNorm) and not module.track_running_stats


def _batch_norm(recorder: Recorder, original: Any) -> Any:
    def forward(module: _BatchNorm, x: Tensor) -> Tensor:
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

