"""Operations of the graph that torch has no single function for.

Every other operation in a graph is a torch function (`call_function`), a tensor method (`call_method`) or a neuron
layer that stays whole (`call_module`). What stands here:

- `batch_norm`: a BatchNorm layer's whole forward, running statistics and batch counter included, for train and eval.
- `batch_norm_copies`: the same for an input that is repeated over time, computed on one copy.
- `Surrogate`: `autograd.Function.apply` of one class as one node, with the class's own backward.
- `assign`: writes a buffer at the end of a forward; the only operation kept for its effect.
- `index_assign`: `x[index] = value` without touching x.
- `drawn_slice`: this rank's part of a dropout or of random numbers that are drawn for the whole value.
- `embedding_rows`: the lookup in this rank's rows of an embedding.
- `vacant`: what stands for an operation on a rank that has none of its channels.
- `affine`: a size that depends on the batch, `slope * batch_size + offset`.
- the collectives over one mesh axis, each with its own gradient:

      all_reduce       P -> R   forward sum over ranks           backward identity
      grad_all_reduce  R -> R   forward identity                 backward sum over ranks
      all_gather       S -> R   forward gather along dim         backward own slice, or (`partial`) reduce-scatter
      shard            R -> S   forward own slice along dim      backward gather
      reduce_scatter   P -> S   forward sum, then own slice      backward gather

The collectives are carried out by the backend that the runtime installs (`use_collectives`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from snnpart import shared_statistics
from snnpart.errors import LaunchError
from snnpart.facts import Pieces


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """BatchNorm over dim 1 of [N, C, ...] as `torch.nn.BatchNorm*d` computes it, counter and averages included.

    `running_*` and `num_batches_tracked` are None for a layer that does not track; `momentum` None means a cumulative
    average.
    """
    use_batch = training or running_mean is None
    factor = 0.0 if momentum is None else momentum
    if training and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if momentum is None:
            factor = 1.0 / float(num_batches_tracked)
    if not x.shape[1]:
        return _no_channels(x, weight, bias)
    if training and shared_statistics.shared():
        return shared_statistics.batch_norm(x, running_mean, running_var, weight, bias, factor, eps)
    return F.batch_norm(_one_sample(x), running_mean, running_var, weight, bias, use_batch, factor, eps)


def _one_sample(x: Tensor) -> Tensor:
    """x, with the stride of a batch of one sample that a batch would have.

    On the CPU torch 2.11 and 2.14 see channels last in forward by the other strides, in backward by this one too: if it
    is another, x is paired with a gradient of another layout, and all gradients are wrong. Views such as `unbind` of
    [T, 1, C, H, W] leave it at C.
    """
    if x.shape[0] != 1 or x.is_contiguous() or x.stride(0) == (whole := x[0].numel()):
        return x
    return x.as_strided(x.shape, (whole, *x.stride()[1:]))


def _no_channels(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """What a norm gives on a rank without channels, which torch may refuse: nothing, and gradients of size 0."""
    form = (1, 0, *(1,) * (x.dim() - 2))
    scaled = x if weight is None else x * weight.reshape(form)
    return scaled.clone() if bias is None else scaled + bias.reshape(form)


def batch_norm_copies(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    copies: int,
) -> Tensor:
    """What one `batch_norm` of `copies` equal x [N, C, ...] in one batch gives for each of them.

    Mean and variance of the batch are those of x. The running variance is unbiased over copies * n numbers a channel
    where x has n. One number a channel has no variance, its copies have 0: then they are normalised together.
    """
    rest = (num_batches_tracked, training, momentum, eps)
    numbers = x.numel() // max(x.shape[1], 1)
    if numbers == 1 and (training or running_mean is None):
        together = x.expand(copies, *x.shape[1:])
        return batch_norm(together, weight, bias, running_mean, running_var, *rest)[:1]
    if not training or running_var is None or numbers == 0:
        return batch_norm(x, weight, bias, running_mean, running_var, *rest)
    seen = running_var.clone()  # autograd keeps what it is given: only a copy may be corrected afterwards
    y = batch_norm(x, weight, bias, running_mean, seen, *rest)
    counted = shared_statistics.total(x.new_full((), numbers)) if shared_statistics.shared() else numbers
    share = copies * (counted - 1) / (copies * counted - 1)
    with torch.no_grad():
        factor = 1.0 / float(num_batches_tracked) if momentum is None and num_batches_tracked is not None else momentum
        running_var.mul_((1.0 - (factor or 0.0)) * (1.0 - share)).add_(seen * share)
    return y


def name_target(target: Any, name: str, module: str, qualname: str = "") -> None:
    """Give an instance that a graph calls the three names by which fx prints a target and analyses know it."""
    for key, value in (("__name__", name), ("__module__", module), ("__qualname__", qualname or name)):
        object.__setattr__(target, key, value)


@dataclass(frozen=True)
class Surrogate:
    """Calls `function.apply`: one node with the class's own forward and backward."""

    function: type[torch.autograd.Function]

    def __post_init__(self) -> None:
        own = self.function
        name_target(self, own.__name__, own.__module__, f"{own.__qualname__}.apply")

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)


def assign(buffer: Tensor, value: Tensor) -> None:
    """Write `value` into `buffer` in place, outside autograd."""
    with torch.no_grad():
        buffer.copy_(value)


def index_assign(x: Tensor, index: Any, value: Any) -> Tensor:
    """A copy of x in which `x[index]` is `value`."""
    out = x.clone()
    out[index] = value
    return out


def embedding_rows(ids: Tensor, weight: Tensor, own: Pieces, padding_idx: int | None = None) -> Tensor:
    """What the rank's rows `own` of an embedding give: zeros where an id is in none of them.

    Args:
        weight: the rank's rows, one piece after the other.
        padding_idx: the row of the whole table that learns nothing.
    """
    local, held, padding, offset = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool), None, 0
    for start, stop in own:
        inside = (ids >= start) & (ids < stop)
        local = torch.where(inside, ids - start + offset, local)
        held = held | inside
        if padding_idx is not None and start <= padding_idx < stop:
            padding = padding_idx - start + offset
        offset += stop - start
    if not offset:
        return F.embedding(local, F.pad(weight, (0, 0, 0, 1))) * 0
    return F.embedding(local, weight, padding).masked_fill(~held.unsqueeze(-1), 0.0)


def vacant(
    inputs: Sequence[Tensor],
    shape: Sequence[int],
    slopes: Sequence[int],
    reference: tuple[int, int, int, int] | None,
    dtype: torch.dtype | None = None,
    others: Sequence[Any] = (),
) -> Tensor:
    """Zeros in place of an operation to which this rank adds nothing: it holds none of its channels.

    The inputs receive zeros as gradients, so that the rank takes part in every collective of backward.

    Args:
        shape, slopes: those of the result's `Value`, of size 0 in the dim that is dealt out.
        reference: (input, dim, size, slope) by which the change of the batch is seen.
        dtype: that of the first input where not given.
        others: what else the operation reads, so that all ranks' graphs read the same values.
    """
    change = 0
    if reference is not None:
        position, dim, size, slope = reference
        change = (inputs[position].shape[dim] - size) // slope
    sizes = tuple(size + slope * change for size, slope in zip(shape, slopes, strict=True))
    result: Tensor = _Vacant.apply(sizes, dtype or inputs[0].dtype, *inputs)
    return result


class _Vacant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, *inputs: Tensor) -> Tensor:
        ctx.shapes = [x.shape for x in inputs]
        return inputs[0].new_zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = zip(ctx.shapes, ctx.needs_input_grad[2:], strict=True)
        return (None, None, *(grads[0].new_zeros(shape) if wanted else None for shape, wanted in needed))


def affine(batch_size: int, slope: int | float, offset: int | float) -> int | float:
    """A size that depends on the batch, or a number made of one."""
    return slope * batch_size + offset


def drawn_slice(
    x: Tensor,
    draw: str,
    dim: int,
    size: int,
    own: Pieces,
    args: Sequence[Any] = (),
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """What `draw(whole, *args, **options)` gives on the rank's pieces `own` of dim `dim`, which has `size` elements.

    The whole mask or noise is drawn on every rank, so that ranks with the same generator state stay together and the
    numbers are those of one process. `draw` is a function of torch or torch.nn.functional; x holds the own pieces.
    """
    function = getattr(F, draw, None) or getattr(torch, draw)
    whole = _ones_like(x, dim % x.dim(), size)
    with torch.no_grad():
        mask = select_pieces(function(whole, *args, **(options or {})), dim, own)
    return mask if draw.endswith("_like") else x * mask


def _ones_like(x: Tensor, dim: int, size: int) -> Tensor:
    """Ones with `size` elements in dim `dim`, in x's memory order, which is that in which numbers are drawn."""
    order = sorted(range(x.dim()), key=lambda d: (-x.stride()[d], d))
    shape = [size if d == dim else x.shape[d] for d in order]
    return x.new_ones(shape).permute([order.index(d) for d in range(x.dim())])


class Collectives(Protocol):
    """Carries out the collectives of a graph; `axis` is a mesh axis, `pieces[r]` what rank r holds of `dim`,
    `last` the dim that lies behind the others in memory, if one does; values travel in that order."""

    def all_reduce(self, x: Tensor, axis: str, last: int | None = None) -> Tensor: ...
    def grad_all_reduce(self, x: Tensor, axis: str, last: int | None = None) -> Tensor: ...
    def all_gather(
        self,
        x: Tensor,
        axis: str,
        dim: int,
        pieces: Sequence[Pieces],
        states: tuple[int, int] | None = None,
        partial: bool = False,
        last: int | None = None,
    ) -> Tensor: ...
    def shard(self, x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces], last: int | None = None) -> Tensor: ...
    def reduce_scatter(
        self, x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces], last: int | None = None
    ) -> Tensor: ...


_backend: Collectives | None = None


@contextmanager
def use_collectives(backend: Collectives) -> Iterator[None]:
    """Carry out collectives with `backend` inside the block."""
    global _backend
    before, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = before


def _current() -> Collectives:
    if _backend is None:
        raise LaunchError("a collective was called outside a launched program", fix="call program.launch() first")
    return _backend


def all_reduce(x: Tensor, axis: str, last: int | None = None) -> Tensor:
    """The sum of x over the ranks of `axis`; the gradient passes unchanged."""
    return _current().all_reduce(x, axis, last)


def grad_all_reduce(x: Tensor, axis: str, last: int | None = None) -> Tensor:
    """x itself; its gradient is summed over the ranks of `axis`."""
    return _current().grad_all_reduce(x, axis, last)


def all_gather(
    x: Tensor,
    axis: str,
    dim: int,
    pieces: Sequence[Pieces],
    states: tuple[int, int] | None = None,
    partial: bool = False,
    last: int | None = None,
) -> Tensor:
    """The whole value from the ranks' pieces of `dim`; the gradient is cut back to the rank's own pieces.

    Args:
        states: (lowest number, how many whole numbers): x holds only these and travels as bits (see `bits`).
        partial: each rank has only its part of the gradient: it is summed over the ranks before it is cut.
    """
    return _current().all_gather(x, axis, dim, pieces, states, partial, last)


def gather_options(node: fx.Node) -> tuple[tuple[int, int] | None, bool]:
    """`states` and `partial` of an all_gather node."""
    states: Any = node.args[4] if len(node.args) > 4 else node.kwargs.get("states")
    partial = node.args[5] if len(node.args) > 5 else node.kwargs.get("partial", False)
    return states, bool(partial)


def shard(x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces], last: int | None = None) -> Tensor:
    """The rank's own pieces of `dim` of a replicated value; the gradient is gathered."""
    return _current().shard(x, axis, dim, pieces, last)


def reduce_scatter(x: Tensor, axis: str, dim: int, pieces: Sequence[Pieces], last: int | None = None) -> Tensor:
    """The rank's own pieces of `dim` of the sum over the ranks; the gradient is gathered."""
    return _current().reduce_scatter(x, axis, dim, pieces, last)


COLLECTIVES = frozenset({all_reduce, grad_all_reduce, all_gather, shard, reduce_scatter})


def select_pieces(x: Tensor, dim: int, pieces: Pieces) -> Tensor:
    """The intervals `pieces` of dim `dim` of x, one after the other."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)
