"""`WeightLater`: a convolution or linear layer whose weight's gradient is computed beside a collective.

In backward the gradient of what a layer reads is summed over the tp ranks before anybody goes on with it; the gradient
of its weight is nobody's business until the end. Autograd computes both at once, and only then does the sum begin. Here

    w' = later(w)                    put before the collective in the graph
    x' = all_gather(x, ...)          whose backward sums
    y = WeightLater(conv2d)(x', w')

the layer's backward gives the gradient of x' alone and *puts off* that of w'. The collective's backward begins the sum,
calls `compute_put_off`, and then waits. autograd comes to `later` after it, because it goes back in the order in which
nodes were made; were it there first, it would compute the gradient itself, so that nothing depends on the order.

What is put off is found without the graph: a weak set of this process holds it. So it works in whatever order consumers
come, and what a step that breaks off has put off goes with its autograd graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from snnpart.compat import own_view
from snnpart.ops import name_target
from snnpart.ops_packed import as_autocast_does


class PutOff:
    """The gradient of one reading of a weight: how to compute it, and then the gradient. `read`: a layer has the
    weight; another one that reads it too takes autograd's way."""

    def __init__(self) -> None:
        self.read = False
        self._how: Callable[[], Tensor] | None = None
        self._found: Tensor | None = None

    def wait(self, how: Callable[[], Tensor]) -> None:
        """Compute it later."""
        self._how, self._found = how, None
        _waiting.add(self)

    def compute(self) -> None:
        if self._how is not None:
            self._found, self._how = self._how(), None
        _waiting.discard(self)

    def take(self) -> Tensor | None:
        """The gradient; None where the backward did not come to the layer."""
        self.compute()
        found, self._found = self._found, None
        return found


_waiting: weakref.WeakSet[PutOff] = weakref.WeakSet()


def compute_put_off() -> None:
    """Compute the gradients that wait, for instance while a collective is under way."""
    for item in list(_waiting):
        item.compute()


class _Later(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.put_off = PutOff()
        return own_view(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        own, given = ctx.put_off.take(), grads[0]
        return given if own is None else own if given is None else own + given


def later(weight: Tensor) -> Tensor:
    """The weight itself, for a `WeightLater` to read."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    found: Tensor = _Later.apply(weight)
    return found


def itself(weight: Tensor) -> Tensor:
    """`later` where nothing is put off."""
    return weight


class Product(Protocol):
    """An operation that is linear in x and in the weight. `channels` is the dim of its result's channels."""

    @property
    def channels(self) -> int: ...
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
    def of_input(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...
    def of_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Linear:
    """[..., in] and [out, in] -> [..., out]."""

    channels = -1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def of_input(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad @ weight

    def of_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return grad.reshape(-1, weight.shape[0]).t() @ x.reshape(-1, weight.shape[1])


@dataclass(frozen=True)
class _Convolution:
    """[N, in, ...] -> [N, out, ...], of any number of dims, transposed or not."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    channels = 1

    @property
    def _options(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self._options)

    def of_input(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grad, x, weight, 0)

    def of_weight(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grad, x, weight, 1)

    def _backward(self, grad: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
        wanted = [which == 0, which == 1, False]
        found: Tensor = torch.ops.aten.convolution_backward(grad, x, weight, None, *self._options, wanted)[which]
        return found


def _convolution(dims: int, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Product | None:
    if isinstance(padding, str):
        return None
    apart, around, holes = (_for_each(dims, item) for item in (stride, padding, dilation))
    return _Convolution(apart, around, holes, False, (0,) * dims, groups)


def _transposed(
    dims: int, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1
) -> Product:
    apart, around, holes, behind = (_for_each(dims, item) for item in (stride, padding, dilation, output_padding))
    return _Convolution(apart, around, holes, True, behind, groups)


def _for_each(dims: int, item: Any) -> tuple[int, ...]:
    return tuple(item) if isinstance(item, (tuple, list)) else (item,) * dims


PRODUCTS: Mapping[Callable[..., Tensor], Callable[..., Product | None]] = {
    F.linear: _Linear,
    torch.conv1d: partial(_convolution, 1),
    torch.conv2d: partial(_convolution, 2),
    torch.conv3d: partial(_convolution, 3),
    torch.conv_transpose1d: partial(_transposed, 1),
    torch.conv_transpose2d: partial(_transposed, 2),
    torch.conv_transpose3d: partial(_transposed, 3),
}
"""By operation: what it is with its arguments behind x, weight and bias; None where it cannot be taken apart."""


class _Apart(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: PutOff, product: Product) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.put_off, ctx.product = put_off, product
        return product.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        grad, product = grads[0], ctx.product
        x, weight = (item.detach() for item in ctx.saved_tensors)  # a weight that leads to what waits would never go
        ctx.put_off.wait(lambda: product.of_weight(grad, x, weight))
        back = product.of_input(grad, x, weight) if ctx.needs_input_grad[0] else None
        others = [dim for dim in range(grad.dim()) if dim != product.channels % grad.dim()]
        return back, None, grad.sum(others) if ctx.needs_input_grad[2] else None, None, None


@dataclass(frozen=True)
class WeightLater:
    """Calls `function`, one of `PRODUCTS`, whose second argument comes from `later`."""

    function: Callable[..., Tensor]

    def __post_init__(self) -> None:
        name_target(self, self.function.__name__, __name__)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        put_off: Any = getattr(weight.grad_fn, "put_off", None)
        product = None if put_off is None or put_off.read else PRODUCTS[self.function](*args, **kwargs)
        batched = weight.dim() in (2, x.dim())  # a convolution may read one sample without a batch dim
        if product is None or not (batched and x.numel()):
            return self.function(x, weight, bias, *args, **kwargs)
        put_off.read = True
        given = (None if item is None else as_autocast_does(item) for item in (x, weight, bias))
        found: Tensor = _Apart.apply(*given, put_off, product)
        return found
