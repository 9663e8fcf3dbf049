"""What a forward changes on the modules it runs through: neuron state, counters, buffers that get another tensor.

`Before` remembers the attributes of every module that is traced through, and compares. State that changes is reset
before every window, so the graph starts from the value after reset and drops the value at the end. A buffer that is
given a new tensor of the same shape is written back; one whose shape changes is state. A buffer may hold the tensor of
an earlier window, which has the shape of the next one at the same batch size: only another batch size tells (`known`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from snnpart.graph import StateSlot

_TORCH_SLOTS = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class NewBuffer:
    """A registered buffer that forward replaced by another tensor."""

    name: str
    before: Tensor
    after: Tensor


class Before:
    """The attributes and buffers of the model's modules before a forward."""

    def __init__(self, model: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> None:
        self._modules: list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]] = []
        inside: tuple[str, ...] = ()
        for path, module in model.named_modules():
            if path.startswith(inside):
                continue
            if is_leaf(module):
                inside = (*inside, f"{path}.")
                continue
            own = {name: _frozen(value) for name, value in vars(module).items() if name not in _TORCH_SLOTS}
            self._modules.append((path, module, own, dict(module._buffers)))

    def slots(self) -> Iterator[StateSlot]:
        """Plain attributes that are not what they were, or are new."""
        for path, module, own, _ in self._modules:
            for name, value in vars(module).items():
                if name not in _TORCH_SLOTS and (name not in own or _differs(own[name], _frozen(value))):
                    yield StateSlot(path, name, _describe(own.get(name, _ABSENT)))

    def carried(self, batch: int) -> Iterator[StateSlot]:
        """Those of them that held, before the forward, a tensor of the shape it has afterwards, batch included."""
        for path, module, own, _ in self._modules:
            for name, before in own.items():
                if _held(before, vars(module).get(name), batch):
                    yield StateSlot(path, name, _describe(before))

    def held(self, batch: int) -> Iterator[str]:
        """The same for buffers."""
        for path, module, _, buffers in self._modules:
            for name, before in buffers.items():
                if _held(before, module._buffers.get(name), batch):
                    yield f"{path}.{name}" if path else name

    def buffers(self, known: Container[str] = ()) -> Iterator[NewBuffer | StateSlot]:
        """Registered buffers that hold another tensor now; those of another shape, or `known` as state, as state."""
        for path, module, _, buffers in self._modules:
            for name, before in buffers.items():
                after = module._buffers.get(name)
                if after is before:
                    continue
                full = f"{path}.{name}" if path else name
                if before is not None and after is not None and _alike(before, after) and full not in known:
                    yield NewBuffer(full, before, after)
                else:
                    yield StateSlot(path, name, _describe(before))


def _held(before: Any, after: Any, batch: int) -> bool:
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or after is before:
        return False
    return before.shape == after.shape and batch in before.shape


def _alike(before: Tensor, after: Tensor) -> bool:
    return before.shape == after.shape and before.dtype == after.dtype


class _Absent:
    pass


_ABSENT = _Absent()


def _frozen(value: Any) -> Any:
    """A container's content now, so that a change inside is seen."""
    if isinstance(value, (list, set)):
        return (type(value), *(id(x) if _opaque(x) else x for x in value))
    if isinstance(value, dict):
        return (dict, *((key, id(x) if _opaque(x) else x) for key, x in value.items()))
    return value


def _opaque(value: Any) -> bool:
    return not isinstance(value, (int, float, str, bool, type(None)))


def _differs(before: Any, after: Any) -> bool:
    if before is after:
        return False
    if type(before) is not type(after) or not isinstance(before, (int, float, str, bool, tuple)):
        return True
    return _has_tensor(before) or bool(before != after)


def _has_tensor(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(item, Tensor) or _has_tensor(item) for item in value)


def _describe(value: Any) -> str:
    if isinstance(value, _Absent):
        return "absent"
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    if isinstance(value, (int, float, str, bool, type(None))):
        return repr(value)
    return type(value[0] if isinstance(value, tuple) and value and isinstance(value[0], type) else value).__name__
