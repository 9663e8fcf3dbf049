"""Everything of torch that is private, in one place: small functions that hide differences between torch releases.

Nothing else in snnpart imports a torch name that begins with an underscore, `torch.utils._pytree` apart.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = ["BatchNormBase", "FakeTensor", "FakeTensorMode", "InstanceNormBase", "TorchDispatchMode"]

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module that hold its hooks."""

WEIGHT_NORM = torch._weight_norm
"""The operation of torch's weight normalisation: `WEIGHT_NORM(v, g, dim)`."""

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised on fake tensors by an operation whose result, or the shape of it, needs the data."""


def fake_mode() -> FakeTensorMode:
    """A mode whose tensors have shape, dtype, strides, device and autograd, but no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def blank_like(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake tensor with shape, strides, dtype, device and gradient of a real one.

    `mode.from_tensor` does more (views, hooks, subclasses) and takes ten times as long. To be called outside the mode.
    A meta tensor, which is on no device yet, stands for one on the CPU.
    """
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    made = blank(mode, tensor.size(), tensor.stride(), tensor.dtype, device)
    return made.requires_grad_() if tensor.requires_grad else made


def blank(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A new fake tensor in memory of its own."""
    with unset_fake_temporarily() if torch._C._len_torch_dispatch_stack() else nullcontext():
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        made: Tensor = FakeTensor(mode, empty, device)
    return made


def knows_its_value(tensor: FakeTensor) -> bool:
    """Whether a fake tensor has data after all, as the result of `torch.tensor(3)` does."""
    return tensor.constant is not None


def dispatch_modes() -> list[Any]:
    """The modes that see every operation of torch now, such as a FakeTensorMode."""
    return _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []


@contextmanager
def shape_errors_unlogged() -> Iterator[None]:
    """A block in which torch does not log the traceback of an error of a fake operation: the error itself is raised.

    torch 2.14 logs some twenty lines at level ERROR for every wrong shape.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def compiled_functions_run_eagerly() -> AbstractContextManager[Any]:
    """A block in which functions made with torch.compile run their Python code.

    Does nothing where nobody has compiled anything, as `set_stance` imports the compiler.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def python_of_script(function: Any) -> Callable[..., Any] | None:
    """The Python function that `torch.jit.script` or `torch.jit.trace` compiled; None where torch did not keep it."""
    return getattr(function, "_torchdynamo_inline", None)


def called_below_autograd(function: Any) -> bool:
    """Whether a kernel is called where no gradient is recorded any more: TorchScript ran it, not Python code."""
    key = torch._C.DispatchKey.AutogradFunctionality  # type: ignore[attr-defined]
    return isinstance(function, torch._ops.OpOverload) and torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def without_torch_function() -> AbstractContextManager[None]:
    """A block in which no TorchFunctionMode and no `__torch_function__` is called."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def storage_key(tensor: Tensor) -> int:
    """Equal for two living tensors exactly when they share memory."""
    key: int = tensor.untyped_storage()._cdata
    return key


def version(tensor: Tensor) -> int:
    """How many times the tensor was written in place; 0 for an inference tensor, which keeps no count."""
    return 0 if tensor.is_inference() else tensor._version


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether `tensor.register_hook` was called: torch has no public way to ask."""
    return bool(tensor._backward_hooks)


def gradient_hooks(tensor: Tensor) -> tuple[Callable[[Tensor], Tensor | None], ...]:
    """What `tensor.register_hook` was given, in this order."""
    return tuple((tensor._backward_hooks or {}).values())


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Whether `tensor.register_post_accumulate_grad_hook` was called."""
    return bool(tensor._post_accumulate_grad_hooks)


def ddp_ignore(module: nn.Module, names: Iterable[str]) -> None:
    """Have a later DDP around `module` leave these parameters and buffers alone.

    `_set_params_and_buffers_to_ignore_for_model` is the only way to say so; torch keeps it stable for its users.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(names))


def ddp_around(module: nn.Module, group: Any) -> DistributedDataParallel:
    """DDP that only reduces gradients: nothing is synchronised when it is built or before a forward.

    torch 2.14 calls the switch for buffers `forward_sync_buffers` and warns about the old name.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    switch: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    return DistributedDataParallel(module, process_group=group, init_sync=False, **switch)


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


def gather_into(whole: Tensor, own: Tensor, group: Any) -> Any:
    """Begin to gather `own` [n] of every rank into `whole` [ranks * n]; what to wait for.

    torch 2.14 calls it `all_gather_single` and warns about the old name.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, own, group=group, async_op=True)


def average_into(own: Tensor, whole: Tensor, group: Any) -> Any:
    """Begin to average `whole` [ranks * n] over the ranks, of which rank r keeps `own` [n], numbers r n to (r + 1) n;
    what to wait for. NCCL can."""
    return _scatter(own, whole, op=dist.ReduceOp.AVG, group=group, async_op=True)


def sum_into(own: Tensor, whole: Tensor, group: Any) -> Any:
    """As `average_into`, with the sum."""
    return _scatter(own, whole, op=dist.ReduceOp.SUM, group=group, async_op=True)


def _scatter(own: Tensor, whole: Tensor, **options: Any) -> Any:
    """torch 2.14 calls it `reduce_scatter_single` and warns about the old name."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(own, whole, **options)


def end_failed_capture(
    device: torch.device, stream: torch.cuda.Stream | None = None, generator: torch.Generator | None = None
) -> None:
    """After a CUDA graph's capture that failed torch's generators still take it for one that goes on ("Offset increment
    outside graph capture"), and nothing random runs any more. A capture that works ends that."""
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with suppress(RuntimeError), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        torch.zeros((), device=device)


def own_view(x: Tensor) -> Tensor:
    """A view of all of x with its strides. `view_as` gives dims of size 1 others, with which some of torch's kernels
    for channels last go wrong or refuse to run."""
    found: Tensor = torch.ops.aten.alias(x)
    return found


def run_accumulation_hooks(parameter: Tensor) -> None:
    """Call what `register_post_accumulate_grad_hook` was given: for a gradient that autograd did not put there."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


Ordered = tuple[int, Literal["F", "B", "I", "W"], int]


def pipeline_order(name: str, pp: int, per_rank: int, microbatches: int) -> dict[int, list[Ordered]]:
    """The actions (stage, kind, microbatch) of each pipeline rank in the order of torch's schedule.

    torch computes the order in methods that read a few numbers only, but the constructors ask for stages on a process
    group; the methods are therefore called on an object that was not constructed. Microbatches are counted here: up to
    torch 2.14 the one of GPipe and 1F1B starts the last stage's forwards at number 1 (its runtime does not).

    Args:
        name: of `schedules.NAMES`; one stage a rank for `gpipe` and `1f1b`, two for `zbv`.
        microbatches: a number that the schedule takes.
    """
    from torch.distributed.pipelining import schedules

    kinds = schedules._ComputationType
    letters: dict[Any, Literal["F", "B", "I", "W"]] = {
        kinds.FORWARD: "F",
        kinds.FULL_BACKWARD: "B",
        kinds.BACKWARD_INPUT: "I",
        kinds.BACKWARD_WEIGHT: "W",
    }
    order: dict[int, list[Ordered]] = {}
    for rank, actions in _torch_schedule(name, pp, per_rank, microbatches).items():
        counts: dict[tuple[int, str], Iterator[int]] = {}
        order[rank] = []
        for action in actions:
            if action is not None and action.computation_type in letters:
                stage, kind = action.stage_index, letters[action.computation_type]
                order[rank].append((stage, kind, next(counts.setdefault((stage, kind), itertools.count()))))
    return order


def _torch_schedule(name: str, pp: int, per_rank: int, microbatches: int) -> dict[int, list[Any]]:
    """torch's own actions of each rank, None where it waits."""
    from torch.distributed.pipelining import schedules

    classes: dict[str, Any] = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
        "interleaved-zb": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
    }
    schedule = classes[name].__new__(classes[name])
    schedule.pp_group_size, schedule.n_local_stages = pp, per_rank
    schedule._num_stages = schedule.num_stages = pp * per_rank
    schedule._n_microbatches = microbatches
    schedule.number_of_rounds = max(1, microbatches // pp)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    if name in ("gpipe", "1f1b"):
        simple: dict[int, list[Any]] = schedule._get_pipeline_order()
        return simple
    return {rank: schedule._calculate_single_rank_operations(rank) for rank in range(pp)}


@contextmanager
def real_tensors() -> Iterator[None]:
    """Make real tensors inside the block even while a FakeTensorMode is active."""
    with unset_fake_temporarily():
        yield


def refresh_flat_weights(module: nn.RNNBase) -> None:
    """Have a recurrent module use the parameters it holds now; torch does this after it is moved or loaded."""
    module._init_flat_weights()


def unscale(grads: list[Tensor], bad: Tensor, inverse: Tensor) -> None:
    """Multiply gradients of one dtype by `inverse`, in place, and set `bad` to 1 if one of them is not finite.

    What `torch.amp.GradScaler` does; on its own it cannot be told about other ranks.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(grads, bad, inverse)


def update_scale(factor: Tensor, good: Tensor, bad: Tensor, *, interval: int) -> None:
    """GradScaler's rule for the next factor: double it after `interval` good steps, halve it after a bad one."""
    torch._amp_update_scale_(factor, good, bad, 2.0, 0.5, interval)


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor in float64, in few kernels."""
    found: Any = torch._foreach_norm(list(tensors), 2, torch.float64)
    return list(found)


def copy_many(into: Sequence[Tensor], come: Sequence[Tensor]) -> None:
    """Copy each tensor of `come` into that of `into`, in one kernel for each pair of dtypes: torch takes one for each
    tensor where they are mixed."""
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for there, here in zip(into, come, strict=True):
        theirs, ours = pairs.setdefault((there.dtype, here.dtype), ([], []))
        theirs.append(there)
        ours.append(here)
    for theirs, ours in pairs.values():
        torch._foreach_copy_(theirs, ours)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each tensor, in one kernel for each dtype."""
    made = [torch.empty_like(tensor) for tensor in tensors]
    copy_many(made, tensors)
    return made


def put_back(tensors: Sequence[Tensor], before: Sequence[Tensor], undo: Tensor) -> None:
    """Give each tensor the bits of that of `before` if `undo` [] is above 0, and its own if not, without asking which.

    Bits are numbers whose differences wrap around: `old + (new - old) * keep` is exact, also for NaN, and takes three
    kernels for each dtype where `torch.where` takes one for each tensor.
    """
    pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for new, old in zip(tensors, before, strict=True):
        number = _bits(new)
        ours, theirs = pairs.setdefault(number.dtype, ([], []))
        ours.append(number)
        theirs.append(_bits(old))
    for dtype, (ours, theirs) in pairs.items():
        torch._foreach_sub_(ours, theirs)
        torch._foreach_mul_(ours, (undo <= 0).to(dtype))
        torch._foreach_add_(ours, theirs)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    x = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    return x.view(_BITS[x.element_size()])


def multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by the factor [], in place and in few kernels."""
    for dtype in {tensor.dtype for tensor in tensors}:
        torch._foreach_mul_([tensor for tensor in tensors if tensor.dtype is dtype], factor.to(dtype))
