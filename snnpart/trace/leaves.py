"""Leaves: modules that stay whole, one `call_module` node a call.

What a call returns comes from the leaf's adapter, or from running it on fakes. Its state does not advance while
tracing, so code that reads or resets the state of a leaf after a call would see a wrong value: it is refused. A leaf
that gets its state as an argument holds none between calls, and its attributes are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.compat import FakeTensor
from snnpart.frameworks import adapter_for, preserved
from snnpart.graph import LeafInfo
from snnpart.trace.cells import Call, How, items_of
from snnpart.trace.patches import patched
from snnpart.trace.recorder import Recorder


class Modules:
    """The modules of the model by identity: path, whether a leaf, and which leaves were called."""

    def __init__(self, model: nn.Module, recorder: Recorder, stays_whole: Callable[[nn.Module], bool]) -> None:
        self.training = model.training
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.called: dict[str, LeafInfo] = {}
        self._recorder, self._stays_whole = recorder, stays_whole
        self._leaf: dict[int, bool] = {}
        self._states: dict[int, tuple[str, frozenset[str]]] = {}
        self._guards: ExitStack = ExitStack()
        self._guarded: set[type] = set()

    def is_leaf(self, module: nn.Module) -> bool:
        known = self._leaf.get(id(module))
        if known is None:
            known = self._leaf[id(module)] = self._stays_whole(module)
        return known

    def path(self, module: nn.Module, caller: str) -> str:
        """The module's path; for one that the model does not register, its class under the caller's path."""
        known = self.paths.get(id(module))
        return f"{caller}.{type(module).__name__}".lstrip(".") if known is None else known

    def note_call(self, module: nn.Module, path: str, hides_state: bool) -> None:
        """Remember that the leaf was called; `hides_state`: it keeps its state between calls on itself."""
        adapter = adapter_for(module)
        self.called.setdefault(path, LeafInfo(path, module, adapter.name, adapter.is_neuron(module)))
        if hides_state and id(module) not in self._states:
            self._states[id(module)] = path, adapter.state_names(module)
            self._guard(type(module))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside the block, access to the state of called leaves is refused."""
        with self._guards:
            yield

    def _guard(self, kind: type[nn.Module]) -> None:
        if kind in self._guarded:
            return
        self._guarded.add(kind)
        get, put = kind.__getattribute__, kind.__setattr__

        def __getattribute__(module: nn.Module, name: str) -> Any:
            self._check(module, name, "read")
            return get(module, name)

        def __setattr__(module: nn.Module, name: str, value: Any) -> None:
            self._check(module, name, "set")
            put(module, name, value)

        guards = [(kind, "__getattribute__", __getattribute__), (kind, "__setattr__", __setattr__)]
        self._guards.enter_context(patched(guards))

    def _check(self, module: nn.Module, name: str, what: str) -> None:
        if self._recorder.paused:
            return
        path, names = self._states.get(id(module), ("", frozenset()))
        if name in names:
            raise self._recorder.error(
                f"the state '{name}' of the neuron layer '{path}' is {what} after a call: it has no value yet",
                "reset the network outside forward; to use a membrane, have the layer return it",
            )


def call_leaf(
    recorder: Recorder, modules: Modules, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Record a leaf's call as one node, and return what it returns as fake tensors."""
    if id(module) not in modules.paths:
        raise recorder.error(
            f"a {type(module).__name__} is called that the model does not register",
            "make it an attribute of its module, or keep it in an nn.ModuleList or nn.ModuleDict",
        )
    inputs: list[Tensor] = []
    args = tuple(_fakes(recorder, arg, inputs) for arg in args)
    kwargs = {key: _fakes(recorder, value, inputs) for key, value in kwargs.items()}
    with recorder.pause():
        out, _ = recorder.results.of(path, args, kwargs, lambda: _result(recorder, module, args, kwargs, inputs))
        detached = not torch.is_grad_enabled() and _carries_gradient(module, inputs)
        recorder.emit("call_module", path, args, dict(kwargs), Call(How("", (), {}), inputs, out, detached))
    modules.note_call(module, path, hides_state=len(inputs) < 2)
    return out


def _carries_gradient(module: nn.Module, inputs: list[Tensor]) -> bool:
    return any(p.requires_grad for p in module.parameters()) or any(t.requires_grad for t in inputs)


def _result(
    recorder: Recorder, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: list[Tensor]
) -> Any:
    """What the leaf returns, in tensors of its own; it is left as it was, so that every call gives the same."""
    out = adapter_for(module).infer(module, args, kwargs)
    if out is NotImplemented:
        for one in inputs:
            recorder.settle(one)
        with preserved(module), recorder.fakes:
            out = module(*args, **kwargs)
    return _own(out, inputs)


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
