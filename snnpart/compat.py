"""Everything of torch that is private, in one place: small functions that hide differences between torch releases.

Nothing else in snnpart imports a torch name that begins with an underscore, `torch.utils._pytree` apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel


def ddp_ignore(module: nn.Module, names: Iterable[str]) -> None:
    """Have a later DDP around `module` leave these parameters and buffers alone.

    `_set_params_and_buffers_to_ignore_for_model` is the only way to say so; torch keeps it stable for its users.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


def ddp_expect_backward(ddp: DistributedDataParallel, roots: Sequence[Tensor]) -> None:
    """Have the next backward reduce gradients. DDP's own forward does this; a pipeline decides it before backward."""
    ddp.reducer.prepare_for_backward(list(roots))


def ddp_finished(ddp: DistributedDataParallel) -> bool:
    """Whether the last backward gave every parameter of the module a gradient, so that all of them were reduced."""
    try:
        ddp._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def fsdp_reduce(module: FSDPModule) -> None:
    """Reduce-scatter the gradients that unsynchronised backwards left on the module, and wait for them.

    What torch.distributed.pipelining does after its last microbatch (`perform_reduce_grad`).
    """
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module.set_requires_gradient_sync(True)
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    for inner in state._state_ctx.all_states:
        for group in _fsdp_groups(inner):
            group.post_backward()
    state._root_post_backward_final_callback()


def _fsdp_groups(state: Any) -> list[Any]:
    """The parameter groups of one FSDP state: several since torch 2.12, at most one before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)
