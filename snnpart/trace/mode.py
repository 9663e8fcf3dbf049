"""The mode: sees every torch function that the user's forward calls, runs it on fake tensors and has it recorded.

In the order in which a call is looked at:

    a query (shape, dtype, dim)              answered
    asks for data (`if t:`, `t.item()`)      TraceError, unless it is a constant of the network
    iteration, masks, batch_norm, ...        a handler of its own
    writes in place                          its twin is recorded, and the written tensor gets the twin's node
    everything else                          run on fakes; recorded when a tensor comes out
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from snnpart.compat import DATA_DEPENDENT, FakeTensor, called_below_autograd, version
from snnpart.errors import TraceError
from snnpart.trace import factories, inplace, results, sizes, spelling, writes
from snnpart.trace.cells import Call, Called, How
from snnpart.trace.flags import TrainingFlag
from snnpart.trace.indexing import basic_view
from snnpart.trace.masked import Selected, is_mask
from snnpart.trace.norms import record_batch_norm
from snnpart.trace.recorder import Recorder

_PROPERTIES = """
    shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized is_nested
    is_mkldnn itemsize nbytes names output_nr retains_grad
"""
_METHODS = """
    dim size stride numel nelement ndimension __len__ is_floating_point is_complex is_contiguous element_size
    storage_offset get_device is_signed is_inference is_conj is_neg is_shared
"""
_SIZES = frozenset(
    [torch.Tensor.shape.__get__, torch.numel]  # type: ignore[attr-defined]
    + [getattr(torch.Tensor, name) for name in ("size", "__len__", "numel", "nelement")]
)
_GRAPH_QUERIES = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("is_leaf", "grad_fn", "output_nr", "retains_grad")
)
QUERIES = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split() if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _METHODS.split()]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_grad_enabled]
)
_DATA = """
    __bool__ __int__ __float__ __complex__ __index__ item tolist numpy __array__ is_nonzero equal allclose __contains__
"""
NEEDS_DATA = frozenset(_DATA.split())
_ONE_DTYPE = frozenset(["linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "__matmul__"])
"""Products that refuse operands of several dtypes on real tensors, but not on fake ones."""


class RecordingMode(TorchFunctionMode):
    """Records what the functions called inside it do."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recorder.paused:
            return self._unrecorded(function, args, kwargs)
        if function in QUERIES:
            if function in _GRAPH_QUERIES:
                self.recorder.settle(args[0])
            answer = function(*args, **kwargs)
            return sizes.watched(answer, self.recorder.asked) if function in _SIZES else answer
        if called_below_autograd(function):
            self.recorder.refused = self.recorder.error(
                f"'{function}' is called here below autograd (by TorchScript or C++ code), without a gradient",
                "call the Python code, or make the scripted module an attribute of the one that calls it",
            )
            raise self.recorder.refused
        name = getattr(function, "__name__", "") or type(function).__name__
        called = Called(function, name, args, kwargs, [])
        handler = self._handlers.get(name)
        result = handler(self, called) if handler is not None else NotImplemented
        if result is not NotImplemented:
            return result
        called = self._on_fakes(called)
        written = writes.written_by(called)
        return self._compute(called) if written is None else inplace.write(self.recorder, called, written, self.run)

    def _unrecorded(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call inside an autograd.Function, which is one node: its result alone."""
        called = Called(function, getattr(function, "__name__", ""), args, kwargs, [])
        if not results.may_be_known(function) or writes.written_by(called) is not None:
            return function(*args, **kwargs)
        return self.recorder.results.of(function, args, kwargs, lambda: function(*args, **kwargs))[0]

    def _on_fakes(self, called: Called) -> Called:
        """The call with every tensor replaced by its fake, which are its `inputs`."""
        inputs: list[Tensor] = []
        args = self._fakes(called.args, inputs)
        kwargs = {key: self._fakes(value, inputs) for key, value in called.kwargs.items()} if called.kwargs else {}
        return Called(called.function, called.name, args, kwargs, inputs)

    def _fakes(self, value: Any, inputs: list[Tensor]) -> Any:
        if isinstance(value, Tensor):
            fake = self.recorder.fake(value)
            inputs.append(fake)
            return fake
        if isinstance(value, Selected):
            value.refuse()
        kind = type(value)
        if kind is tuple:
            return tuple([self._fakes(item, inputs) for item in value])
        if kind is list:
            return [self._fakes(item, inputs) for item in value]
        if isinstance(value, tuple) and kind is not torch.Size and hasattr(value, "_fields"):
            return kind(*(self._fakes(item, inputs) for item in value))
        if kind is dict:
            return {key: self._fakes(item, inputs) for key, item in value.items()}
        return sizes.plain(value)

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on fakes. A training flag among the arguments counts as True, so that dropout makes a new tensor."""
        if any(isinstance(arg, TrainingFlag) for arg in args):
            args = tuple(True if isinstance(arg, TrainingFlag) else arg for arg in args)
        if any(isinstance(value, TrainingFlag) for value in kwargs.values()):
            kwargs = {key: True if isinstance(value, TrainingFlag) else value for key, value in kwargs.items()}
        if function is torch.Tensor.__getitem__ and (view := basic_view(*args)) is not None:
            return view
        try:
            if args and isinstance(args[0], Tensor) and not _needs_mode(function):
                return function(*args, **kwargs)
            with self.recorder.fakes:
                return function(*args, **kwargs)
        except DATA_DEPENDENT as error:
            name = getattr(function, "__name__", "")
            raise self._depends_on_data(name) from error

    def _depends_on_data(self, name: str) -> TraceError:
        return self.recorder.error(
            f"'{name}' gives a result, or a shape, that depends on the data",
            "use an operation whose shape is fixed (torch.where, a mask), or move this out of forward",
        )

    def _compute(self, called: Called) -> Any:
        function, args, kwargs = called.function, called.args, called.kwargs
        if results.may_be_known(function):
            out, known = self.recorder.results.of(function, args, kwargs, lambda: self._checked(called))
            if known:
                self._emit(called, out)
                return out
        else:
            out = self._checked(called)
        if isinstance(out, Tensor):
            if any(out is tensor for tensor in called.inputs):
                return self._same(called, out)
        elif not _holds_tensor(out):
            return out
        self._emit(called, out)
        return out

    def _checked(self, called: Called) -> Any:
        """The result on fakes of a call that should write into none of its arguments."""
        versions = [version(tensor) for tensor in called.inputs]
        out = self.run(called.function, called.args, called.kwargs)
        if any(version(tensor) != before for tensor, before in zip(called.inputs, versions, strict=True)):
            raise self.recorder.error(
                f"'{called.name}' writes into one of its arguments", "use the function that returns a new tensor"
            )
        if called.name in _ONE_DTYPE and len({tensor.dtype for tensor in called.inputs}) > 1:
            dtypes = " and ".join(str(tensor.dtype).removeprefix("torch.") for tensor in called.inputs)
            raise RuntimeError(f"{called.name} needs operands of one dtype, but got {dtypes}")
        return out

    def _emit(self, called: Called, out: Any) -> None:
        """Record the call as a node."""
        spelled = spelling.spell(called)
        how = How(spelled.name, called.args[1:], called.kwargs)
        detached = not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in called.inputs)
        call = Call(how, called.inputs, out, detached)
        self.recorder.emit(spelled.op, spelled.target, spelled.args, spelled.kwargs, call)

    def _same(self, called: Called, out: Tensor) -> Tensor:
        """A call that gave its argument back leaves no node, except `contiguous`: at other sizes it makes a copy."""
        recorder = self.recorder
        if called.name == "contiguous" and not recorder.is_root(out):
            node = recorder.graph.call_method("contiguous", (recorder.node(out), *called.args[1:]), called.kwargs)
            recorder.rebind(out, node)
        return out

    def _need_data(self, called: Called) -> Any:
        recorder = self.recorder
        tensors = [arg for arg in called.args if isinstance(arg, Tensor)]
        if any(isinstance(t, FakeTensor) or t.requires_grad or recorder.is_written(t) for t in tensors):
            raise recorder.error(
                f"Python asks for the values of a tensor here ('{called.name}'), which are not known while tracing",
                "use torch.where or a mask instead of a branch, keep numbers as tensors, or move this out of forward",
            )
        names = [recorder.roots[id(t)].name if id(t) in recorder.roots else "a tensor from outside" for t in tensors]
        recorder.assume("constant", f"the value of {', '.join(names)} was read as a Python value ('{called.name}')")
        return called.function(*called.args, **called.kwargs)

    def _iterate(self, called: Called) -> Any:
        return iter(self.__torch_function__(torch.unbind, (), (called.args[0], 0)))

    def _select(self, called: Called) -> Any:
        x, index = called.args
        if not is_mask(x, index):
            return NotImplemented
        return Selected(self.recorder.fake(x), self.recorder.fake(index), self._depends_on_data(called.name))

    def _assign(self, called: Called) -> Any:
        """`x[mask] = value` for a mask of x's shape: x becomes another tensor's values."""
        x, index, value = called.args
        single = not isinstance(value, Tensor) or value.dim() == 0
        if not is_mask(x, index) or not (single or isinstance(value, Selected)):
            return NotImplemented
        if isinstance(value, Selected):
            filled = self.__torch_function__(torch.where, (), (index, value.whole(self.recorder.fake(index)), x))
        else:
            filled = self.__torch_function__(torch.Tensor.masked_fill, (), (x, index, value))
        return self.__torch_function__(torch.Tensor.copy_, (), (x, filled))

    def _deepcopy(self, called: Called) -> Any:
        return self.__torch_function__(torch.clone, (), (called.args[0],))

    def _refuse(self, called: Called) -> Any:
        raise self.recorder.error(
            f"'{called.name}' acts on gradients inside forward, which the graph cannot hold",
            "put it in an autograd.Function, or move it out of forward",
        )

    def _set_property(self, called: Called) -> Any:
        attribute = called.function.__self__.__name__
        if attribute == "data":
            raise self.recorder.error("it assigns to '.data'", "use torch operations that return a new tensor")
        return self._set_flag(called._replace(name=attribute))

    def _set_flag(self, called: Called) -> Any:
        """`x.requires_grad = flag`, `x.requires_grad_(flag)`: nothing to record, but not for the network's tensors."""
        x, wanted = called.args[0], called.args[1] if len(called.args) > 1 else called.kwargs.get("requires_grad", True)
        known = self.recorder.roots.get(id(x))
        self.recorder.settle(x)
        if known is not None and called.name.startswith("requires_grad") and x.requires_grad != bool(wanted):
            raise self.recorder.error(
                f"forward changes requires_grad of '{known.name}'", "set requires_grad before the model is traced"
            )
        return self.run(called.function, (self.recorder.fake(x), *called.args[1:]), called.kwargs)

    def _detach_in_place(self, called: Called) -> Any:
        recorder, x = self.recorder, self.recorder.fake(called.args[0])
        node = recorder.graph.call_function(torch.detach, (recorder.node(x),))
        self.run(torch.Tensor.detach_, (x,), {})
        recorder.rebind(x, node)
        return x

    def _sized(self, called: Called) -> Any:
        """A tensor is made, or viewed: sizes that are tensors, and a tensor for the number that fills it."""
        known = factories.with_plain_sizes(called, self._size)
        if known is not None:
            return self.__torch_function__(known.function, (), known.args, known.kwargs)
        return factories.filled(called, lambda function, *given: self.__torch_function__(function, (), *given))

    def _size(self, x: Tensor) -> Any:
        return self._need_data(Called(torch.Tensor.__index__, "a size", (x,), {}, []))

    def _batch_norm(self, called: Called) -> Any:
        if called.function is not F.batch_norm:
            return NotImplemented
        return record_batch_norm(self.recorder, *_batch_norm_arguments(*called.args, **called.kwargs))

    _handlers: dict[str, Callable[[RecordingMode, Called], Any]] = {
        "__iter__": _iterate,
        "__getitem__": _select,
        "__setitem__": _assign,
        "__deepcopy__": _deepcopy,
        "backward": _refuse,
        "grad": _refuse,
        "register_hook": _refuse,
        "register_post_accumulate_grad_hook": _refuse,
        "__set__": _set_property,
        "requires_grad_": _set_flag,
        "detach_": _detach_in_place,
        "batch_norm": _batch_norm,
        **dict.fromkeys(factories.MADE | factories.SHAPED, _sized),
    } | dict.fromkeys(NEEDS_DATA, _need_data)


def _batch_norm_arguments(
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Any, ...]:
    """The arguments of `F.batch_norm` in the order of `ops.batch_norm`."""
    return input, weight, bias, running_mean, running_var, None, training, momentum, eps


def _needs_mode(function: Any) -> bool:
    """Whether a function of a fake tensor must run under the fake mode: most bring it along; entering it is slow."""
    return isinstance(function, FunctionType) or function is torch.Tensor.new_tensor


def _holds_tensor(out: Any) -> bool:
    if isinstance(out, Tensor):
        return True
    if isinstance(out, (tuple, list)):
        return any(_holds_tensor(item) for item in out)
    return isinstance(out, dict) and any(_holds_tensor(item) for item in out.values())
