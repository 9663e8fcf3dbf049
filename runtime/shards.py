"""An optimizer's step on this rank's shards instead of DTensors, for optimizers that treat every number alone.

DTensor does not know every fused operation, and dispatches each one slowly. Inside the block the optimizer's groups and
state hold plain tensors over the same memory; afterwards they hold DTensors again, which checkpoints expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@contextmanager
def on_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A block in which the optimizer sees local tensors only."""
    whole = [group["params"] for group in optimizer.param_groups]
    sharded = [p for group in whole for p in group if isinstance(p, DTensor)]
    if not sharded:
        yield
        return
    local = {p: _local(p) for p in sharded}
    _exchange(optimizer, local, lambda p, x: x.to_local() if isinstance(x, DTensor) else x)
    for group in optimizer.param_groups:
        group["params"] = [local.get(p, p) for p in group["params"]]
    try:
        yield
    finally:
        back = {shard: p for p, shard in local.items()}
        _exchange(optimizer, back, _as_sharded)
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = params


def _exchange(optimizer: torch.optim.Optimizer, keys: Mapping[Any, Any], change: Callable[[Tensor, Any], Any]) -> None:
    """Give the state of each parameter to another one, its tensors changed for that one."""
    for old, new in keys.items():
        if old in optimizer.state:
            state = optimizer.state.pop(old)
            optimizer.state[new] = {name: change(new, x) for name, x in state.items()}


def _local(parameter: DTensor) -> nn.Parameter:
    shard = nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)
    if isinstance(parameter.grad, DTensor):
        shard.grad = parameter.grad.to_local()
    return shard


def _as_sharded(parameter: Tensor, x: Any) -> Any:
    """A state tensor of the shard's shape as the DTensor that belongs to the parameter."""
    assert isinstance(parameter, DTensor)
    if not isinstance(x, Tensor) or x.shape != parameter.to_local().shape or x.dim() == 0:
        return x
    return DTensor.from_local(
        x,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
