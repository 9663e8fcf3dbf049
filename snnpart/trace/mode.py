"""The mode: sees every torch function that the user's forward calls, runs it on fake tensors and has it recorded.

In the order in which a call is looked at:

    a query (shape, dtype, dim)              answered
    asks for data (`if t:`, `t.item()`)      TraceError, unless it is a constant of the network
    iteration, batch_norm, ...               a handler of its own
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

from snnpart import ops
from snnpart.compat import DATA_DEPENDENT, version
from snnpart.trace import writes
from snnpart.trace.flags import TrainingFlag
from snnpart.trace.norms import record_batch_norm
from snnpart.trace.recorder import Call, How, Recorder
from snnpart.trace.writes import Twin

_QUERY_PROPERTIES = (
    "shape dtype device layout ndim requires_grad is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
    "is_mkldnn itemsize nbytes names output_nr retains_grad"
).split()
_QUERY_METHODS = (
    "dim size stride numel nelement ndimension __len__ is_floating_point is_complex is_contiguous element_size "
    "storage_offset get_device is_signed is_inference is_conj is_neg is_shared"
).split()
QUERIES = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _QUERY_PROPERTIES if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _QUERY_METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_grad_enabled]
)
NEEDS_DATA = frozenset(
    "__bool__ __int__ __float__ __complex__ __index__ item tolist numpy __array__ is_nonzero equal allclose __contains__"
    .split()
)  # fmt: skip
_GRADIENT_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_REFLECTED = {"__rdiv__": "truediv", "__rtruediv__": "truediv", "__rpow__": "pow", "__rmod__": "mod",
              "__rfloordiv__": "floordiv", "__rmatmul__": "matmul", "__rsub__": "sub", "__radd__": "add",
              "__rmul__": "mul", "__rand__": "and_", "__ror__": "or_", "__rxor__": "xor", "__rlshift__": "lshift",
              "__rrshift__": "rshift"}  # fmt: skip


class RecordingMode(TorchFunctionMode):
    """Records what the functions called inside it do."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recorder.paused or function in QUERIES:
            return function(*args, **kwargs)
        name = _name(function)
        if name in NEEDS_DATA:
            return self._need_data(function, name, args, kwargs)
        handler = _HANDLERS.get(name)
        if handler is not None:
            result = handler(self, function, name, args, kwargs)
            if result is not NotImplemented:
                return result
        inputs: list[Tensor] = []
        args = self._fakes(args, inputs)
        kwargs = {key: self._fakes(value, inputs) for key, value in kwargs.items()} if kwargs else kwargs
        written = writes.written_by(function, name, args, kwargs)
        if written is not None:
            return self._write(function, name, args, kwargs, inputs, written)
        return self._compute(function, name, args, kwargs, inputs)

    def _fakes(self, value: Any, inputs: list[Tensor]) -> Any:
        """The value with every tensor replaced by its fake; the fakes are added to `inputs`."""
        if isinstance(value, Tensor):
            fake = self.recorder.fake(value)
            inputs.append(fake)
            return fake
        kind = type(value)
        if kind is tuple:
            return tuple([self._fakes(item, inputs) for item in value])
        if kind is list:
            return [self._fakes(item, inputs) for item in value]
        if isinstance(value, tuple) and not isinstance(value, torch.Size) and hasattr(value, "_fields"):
            return kind(*(self._fakes(item, inputs) for item in value))
        if kind is dict:
            return {key: self._fakes(item, inputs) for key, item in value.items()}
        return value

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on fakes. A training flag among the arguments counts as True, so that dropout makes a new tensor."""
        if any(isinstance(arg, TrainingFlag) for arg in args):
            args = tuple(True if isinstance(arg, TrainingFlag) else arg for arg in args)
        if any(isinstance(value, TrainingFlag) for value in kwargs.values()):
            kwargs = {key: True if isinstance(value, TrainingFlag) else value for key, value in kwargs.items()}
        try:
            if args and isinstance(args[0], Tensor) and not isinstance(function, FunctionType):
                return function(*args, **kwargs)  # a fake tensor brings its mode along
            with self.recorder.fakes:
                return function(*args, **kwargs)
        except DATA_DEPENDENT as error:
            raise self.recorder.error(
                f"'{_name(function)}' gives a result, or a shape, that depends on the data",
                "use an operation whose shape is fixed (torch.where, a mask), or move this out of forward",
            ) from error

    def _compute(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor]
    ) -> Any:
        versions = [version(tensor) for tensor in inputs]
        out = self._run(function, args, kwargs)
        if any(version(tensor) != before for tensor, before in zip(inputs, versions, strict=True)):
            raise self.recorder.error(
                f"'{name}' writes into one of its arguments", "use the function that returns a new tensor"
            )
        if isinstance(out, Tensor):
            if any(out is tensor for tensor in inputs):
                return self._same(out, name, args, kwargs)
        elif not _holds_tensor(out):
            return out
        if name == "__get__":
            name, kwargs = function.__self__.__name__, {}
            op, target, args = _property(name, args)
        else:
            op, target, args = _spelling(function, name, args)
        self._emit(op, target, name, args, kwargs, inputs, out)
        return out

    def _same(self, out: Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A call that gave its argument back leaves no node, except `contiguous`: at other sizes it makes a copy."""
        recorder = self.recorder
        if name == "contiguous" and not recorder.is_root(out):
            recorder.rebind(out, recorder.graph.call_method(name, (recorder.node(out), *args[1:]), kwargs))
        return out

    def _emit(
        self, op: str, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], out: Any
    ) -> None:  # fmt: skip
        detached = not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        self.recorder.emit(op, target, args, kwargs, Call(How(name, args[1:], kwargs), inputs, out, detached))

    # ---- writes in place

    def _write(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], written: Any
    ) -> Any:  # fmt: skip
        if name in writes.REFUSED or not isinstance(written, Tensor):
            raise self.recorder.error(f"'{name}' cannot be held in a graph", "make a new tensor instead")
        if name in writes.METADATA:
            return self._change_shape(function, name, args, kwargs, written)
        node = self._twin_node(function, name, args, kwargs, written)
        detached = not torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        out = self._run(function, args, kwargs)
        if detached and not written.requires_grad and written.is_floating_point():
            self.recorder.mark(node, written, requires_grad=True)
            node = self.recorder.graph.call_function(torch.detach, (node,))
        self.recorder.write(written, node)
        return out

    def _change_shape(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: Tensor
    ) -> Tensor:
        recorder = self.recorder
        node = recorder.graph.call_method(name[:-1], (recorder.node(written), *args[1:]), kwargs)
        with torch.no_grad():
            before = written.detach()
        self._run(function, args, kwargs)
        recorder.reshaped(written, before, node, How(name, args[1:], kwargs))
        return written

    def _twin_node(
        self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], written: Tensor
    ) -> Any:
        recorder, graph = self.recorder, self.recorder.graph
        if name == "__setitem__":
            return graph.call_function(ops.index_assign, tuple(recorder.argument(arg) for arg in args))
        if name == "copy_":
            return self._copied(written, args[1] if len(args) > 1 else kwargs["src"])
        twin = writes.filled(name, written, args, kwargs) or writes.twin_of(function, name, args, kwargs)
        dtype = self._dtype_of(twin) if twin else None
        if twin is None or dtype is None:
            if not hasattr(torch.Tensor, name):
                raise recorder.error(f"'{name}' writes in place and has no twin that does not", "make a new tensor instead")
            clone = graph.call_function(torch.clone, (recorder.node(written),))
            recorder.mark(clone, written)
            rest = tuple(recorder.argument(arg) for arg in args[1:])
            return graph.call_method(name, (clone, *rest), {k: recorder.argument(v) for k, v in kwargs.items()})
        node = graph.create_node(
            twin.op,
            twin.target,
            tuple(recorder.argument(arg) for arg in twin.args),
            {key: recorder.argument(value) for key, value in twin.kwargs.items()},
        )
        return node if dtype == written.dtype else self._cast(node, written, dtype)

    def _dtype_of(self, twin: Twin) -> torch.dtype | None:
        """The dtype of the twin's result; None when the twin does not take these arguments."""
        try:
            with torch.no_grad():
                result = self._run(twin.function, twin.args, twin.kwargs)
        except (RuntimeError, TypeError):
            return None
        return result.dtype if isinstance(result, Tensor) else None

    def _cast(self, node: Any, written: Tensor, dtype: torch.dtype) -> Any:
        self.recorder.mark(node, written.to(dtype) if dtype != written.dtype else written)
        return self.recorder.graph.call_method("to", (node, written.dtype))

    def _copied(self, written: Tensor, source: Any) -> Any:
        """The value of `written.copy_(source)`."""
        recorder, graph = self.recorder, self.recorder.graph
        node, made = recorder.node(source), source
        for method, args in (("to", (written.device,)), ("to", (written.dtype,)), ("expand", tuple(written.shape))):
            with torch.no_grad():
                now = self._run(getattr(torch.Tensor, method), (made, *args), {})
            if now is not made and (method == "to" or now.shape != made.shape):
                node = graph.call_method(method, (node, *args))
                recorder.mark(node, now, source.requires_grad)
            made = now
        return node

    # ---- handlers

    def _need_data(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        real = all(type(t).__name__ != "FakeTensor" and not t.requires_grad and not recorder.is_written(t) for t in tensors)
        if real:
            names = [recorder.roots[id(t)].name if id(t) in recorder.roots else "a tensor from outside" for t in tensors]
            recorder.assume("constant", f"the value of {', '.join(names)} was read as a Python value ('{name}')")
            return function(*args, **kwargs)
        raise recorder.error(
            f"Python asks for the values of a tensor here ('{name}'), which are not known when the graph is made",
            "use torch.where or a mask instead of a branch, keep numbers as tensors, or move this out of forward",
        )

    def _iterate(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return iter(self.__torch_function__(torch.unbind, (), (args[0], 0)))

    def _deepcopy(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.__torch_function__(torch.clone, (), (args[0],))

    def _refuse(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise self.recorder.error(
            f"'{name}' acts on gradients inside forward, which the graph cannot hold",
            "put it in an autograd.Function, or move it out of forward",
        )

    def _set_property(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        attribute = function.__self__.__name__
        if attribute == "data":
            raise self.recorder.error("it assigns to '.data'", "use torch operations that return a new tensor")
        return self._set_flag(function, attribute, args, kwargs)

    def _set_flag(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`x.requires_grad = flag`, `x.requires_grad_(flag)`: nothing to record, but not for the network's tensors."""
        wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
        known = self.recorder.roots.get(id(args[0]))
        if known is not None and name.startswith("requires_grad") and args[0].requires_grad != bool(wanted):
            raise self.recorder.error(
                f"forward changes requires_grad of '{known.name}'", "set requires_grad before the model is traced"
            )
        with self.recorder.fakes:
            return function(self.recorder.fake(args[0]), *args[1:], **kwargs)

    def _detach_in_place(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        x = recorder.fake(args[0])
        node = recorder.graph.call_function(torch.detach, (recorder.node(x),))
        with recorder.fakes:
            x.detach_()
        recorder.rebind(x, node)
        return x

    def _batch_norm(self, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is not F.batch_norm:
            return NotImplemented
        return record_batch_norm(self.recorder, *_batch_norm_arguments(*args, **kwargs))


def _batch_norm_arguments(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: Any = False, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of `F.batch_norm` in the order of `ops.batch_norm`."""
    return input, weight, bias, running_mean, running_var, None, training, momentum, eps


_HANDLERS: dict[str, Callable[..., Any]] = {
    "__iter__": RecordingMode._iterate,
    "__deepcopy__": RecordingMode._deepcopy,
    "backward": RecordingMode._refuse,
    "grad": RecordingMode._refuse,
    "register_hook": RecordingMode._refuse,
    "register_post_accumulate_grad_hook": RecordingMode._refuse,
    "__set__": RecordingMode._set_property,
    "requires_grad_": RecordingMode._set_flag,
    "detach_": RecordingMode._detach_in_place,
    "batch_norm": RecordingMode._batch_norm,
}


def _name(function: Any) -> str:
    return getattr(function, "__name__", "") or type(function).__name__


def _holds_tensor(out: Any) -> bool:
    if isinstance(out, Tensor):
        return True
    if isinstance(out, (tuple, list)):
        return any(_holds_tensor(item) for item in out)
    return isinstance(out, dict) and any(_holds_tensor(item) for item in out.values())


def _property(name: str, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """How `x.T`, `x.mT`, `x.data` and the like are written in the graph."""
    x = args[0]
    if name == "data":
        return "call_function", torch.detach, (x,)
    if name == "T":
        return "call_method", "permute", (x, *range(x.dim() - 1, -1, -1))
    if name == "mT":
        return "call_method", "transpose", (x, -2, -1)
    return "call_function", getattr, (x, name)


def _spelling(function: Any, name: str, args: tuple[Any, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    """How a call is written in the graph: op, target and arguments."""
    import operator

    if name == "__getitem__":
        return "call_function", operator.getitem, args
    method = getattr(torch.Tensor, name, None)
    if method is not function and method is not getattr(function, "__wrapped__", function):  # Tensor.__pow__ wraps pow
        return "call_function", function, args
    if name in _REFLECTED:
        return "call_function", getattr(operator, _REFLECTED[name]), (args[1], args[0])
    return "call_method", name, args
