"""State of a leaf as data: taken from the module after a window and given back before the next.

What a leaf holds is what its adapter calls state: memories, state buffers, and the plain attributes beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.errors import ConfigError
from snnpart.frameworks.registry import adapter_for

State = dict[tuple[str, str], Any]
"""(path inside the leaf, attribute) -> value."""


def holds_state(leaf: nn.Module) -> bool:
    """Whether the leaf, or a module in it, keeps state on itself."""
    return any(adapter_for(module).state_names(module) for module in leaf.modules())


def take_state(leaf: nn.Module, *, detach: bool = True) -> State:
    """The leaf's state, without its autograd graph unless `detach` is False."""
    return {
        (path, name): _detached(_held(module)[name]) if detach else _copied(_held(module)[name])
        for path, module in leaf.named_modules()
        for name in adapter_for(module).state_names(module)
        if name in _held(module)
    }


def give_state(leaf: nn.Module, state: State) -> None:
    """Put the state on the leaf."""
    for (path, name), value in state.items():
        module = leaf.get_submodule(path)
        place: dict[str, Any] = module._buffers if name in module._buffers else vars(module)
        place[name] = dict(value) if isinstance(value, Mapping) else value


def restart(state: State, fresh: State, mask: Tensor, where: str) -> State:
    """The state in which the samples of `mask` [N] start anew; `fresh` is that of a reset leaf.

    Raises:
        ConfigError: a state does not have the samples in dim 0, or its start is not one number.
    """
    return {key: _restarted(value, fresh.get(key), mask, f"{where}, state '{key[1]}'") for key, value in state.items()}


def _restarted(value: Any, fresh: Any, mask: Tensor, where: str) -> Any:
    if isinstance(value, Mapping):
        start = fresh if isinstance(fresh, Mapping) else {}
        return {name: _restarted(item, start.get(name), mask, f"{where}.{name}") for name, item in value.items()}
    if not isinstance(value, Tensor) or value.numel() == 0:
        return value
    number = _number(fresh)
    if number is None or value.dim() == 0 or value.shape[0] != mask.shape[0]:
        raise ConfigError(
            f"a tensor of shape {tuple(value.shape)} cannot start anew for some of {mask.shape[0]} samples",
            where=where,
            fix="reset all samples at once",
        )
    return torch.where(mask.reshape(-1, *(1,) * (value.dim() - 1)), torch.full_like(value, number), value)


def _number(fresh: Any) -> float | None:
    if isinstance(fresh, (bool, int, float)):
        return float(fresh)
    if isinstance(fresh, Tensor):
        return 0.0 if fresh.numel() == 0 else float(fresh) if fresh.numel() == 1 else None
    return None


def _held(module: nn.Module) -> Mapping[str, Any]:
    return {**vars(module), **module._buffers}


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return {name: _detached(item) for name, item in value.items()} if isinstance(value, Mapping) else value
