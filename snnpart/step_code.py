"""Triton expressions for the operations of a recorded step (`neuron_step`).

`write_step` prints a graph of element-wise aten operations as lines `name = expression`. Every value is a tile of
numbers in the compute type `CT`, or of int1; a number stays a number. Operations that only change how one step's tensor
is viewed are the value itself, and a value that is written in place has a new name from there on. A boolean mask as an
index keeps all elements: what the user computes for some of them is computed for all and chosen where it is put back.

What has no expression is a `StepError` with the operation's name; `check_code` finds out before anything is generated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from snnpart.neuron_step import NeuronStep, StepError

_VIEWS = frozenset(
    [
        *("alias", "detach", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "select", "select_backward"),
        *("expand", "unbind", "stack", "cat", "clone", "contiguous", "lift_fresh", "lift_fresh_copy", "unflatten"),
        *("flatten", "sum"),
    ]
)
_COPIES = frozenset({"clone", "stack", "cat", "select_backward", "lift_fresh_copy"})
FILLED = {
    **dict.fromkeys(("zero", "zeros", "zeros_like", "new_zeros"), 0.0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1.0),
}
"""Operations that make a tensor of one number, and it; those of `full` are given theirs."""
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne":
    "!=", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "logical_and": "&", "logical_or": "|",
    "logical_xor": "^",
}  # fmt: skip
_COMPARISONS = frozenset({"gt", "ge", "lt", "le", "eq", "ne"})
_ONE = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "log": "tl.log({0})",
    "log1p": "tl.log(1.0 + {0})",
    "expm1": "(tl.exp({0}) - 1.0)",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "(1.0 / tl.sqrt({0}))",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "erf": "tl.erf({0})",
    "erfc": "(1.0 - tl.erf({0}))",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "round": "(({0} + ROUND) - ROUND)",
    "sigmoid": "(1.0 / (1.0 + tl.exp(-{0})))",
    "tanh": "(2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0)",
    "reciprocal": "(1.0 / {0})",
    "relu": "tl.maximum({0}, 0.0)",
    "square": "({0} * {0})",
    "sign": "(({0} > 0.0).to(CT) - ({0} < 0.0).to(CT))",
    "sgn": "(({0} > 0.0).to(CT) - ({0} < 0.0).to(CT))",
    "logical_not": "({0} == 0)",
    "bitwise_not": "({0} == 0)",
}
_TWO = {
    "rsub": "({1} - {0})",
    "maximum": "tl.maximum({0}, {1})",
    "minimum": "tl.minimum({0}, {1})",
    "clamp_min": "tl.maximum({0}, {1})",
    "clamp_max": "tl.minimum({0}, {1})",
    "sigmoid_backward": "({0} * (1.0 - {1}) * {1})",
    "tanh_backward": "({0} * (1.0 - {1} * {1}))",
}


@dataclass
class _Cell:
    """A value's present name, which all views of it share."""

    text: str
    boolean: bool = False
    number: bool = False


@dataclass
class _Writer:
    prefix: str
    cells: dict[fx.Node, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def name(self, expression: str, boolean: bool) -> _Cell:
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return _Cell(name, boolean)

    def cell(self, item: Any) -> _Cell:
        if isinstance(item, fx.Node):
            found: _Cell = self.cells[item]
            return found
        if isinstance(item, bool):
            return _Cell("1" if item else "0", number=True)
        return _Cell(_number(float(item)), number=True)

    def real(self, item: Any) -> str:
        """The value as a number of the compute type."""
        found = self.cell(item)
        return f"{found.text}.to(CT)" if found.boolean else found.text


def write_step(graph: fx.Graph, inputs: Sequence[str], prefix: str) -> tuple[list[str], list[str | None]]:
    """Lines that compute the graph from variables named `inputs`, and the expressions of its results (None: no value).

    Names made begin with `prefix`.

    Raises:
        StepError: an operation has no expression.
    """
    writer, given = _Writer(prefix), iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            writer.cells[node] = _Cell(next(given))
        elif node.op == "get_attr":
            writer.cells[node] = writer.cell(node.meta["constant"])
        elif node.op == "output":
            return writer.lines, [_result(writer, item) for item in node.args[0]]  # type: ignore[union-attr]
        else:
            writer.cells[node] = _write(writer, node)
    raise AssertionError("a graph without output")


def check_code(step: NeuronStep) -> None:
    """StepError when an operation of the step has no Triton expression."""
    for one in (step.first, step.next):
        for graph in (one.forward, one.backward):
            count = sum(node.op == "placeholder" for node in graph.nodes)
            write_step(graph, [f"a{i}" for i in range(count)], "c")


def _result(writer: _Writer, item: Any) -> str | None:
    if item is None:
        return None
    found = writer.cell(item)
    return f"({found.text} + tl.zeros([R, B], CT))" if found.number else writer.real(item)


def _write(writer: _Writer, node: fx.Node) -> Any:
    packet = getattr(node.target, "overloadpacket", None)
    name = packet.__name__ if packet is not None else getattr(node.target, "__name__", "")
    if name == "getitem":
        return writer.cells[node.args[0]][node.args[1]]  # type: ignore[index]
    in_place = name.endswith("_") and not name.endswith("__")
    name = name.rstrip("_") if in_place else name
    if name in _VIEWS:
        return _view(writer, node, name)
    if name == "index" and _masks(node):
        return writer.cells[node.args[0]]  # type: ignore[index]
    made = _compute(writer, node, name)
    if not in_place:
        return made
    target = writer.cells[node.args[0]]  # type: ignore[index]
    target.text, target.boolean, target.number = made.text, made.boolean, made.number
    return target


def _compute(writer: _Writer, node: fx.Node, name: str) -> _Cell:
    if name in FILLED or name in ("full_like", "full", "scalar_tensor", "new_full"):
        return _filled(node, name)
    if name in _INFIX:
        return _infix(writer, node, name)
    if name in _ONE:
        text = writer.cell(node.args[0]).text if name.endswith("_not") else writer.real(node.args[0])
        return writer.name(_ONE[name].format(text), name.endswith("_not"))
    if name in _TWO:
        return writer.name(_TWO[name].format(*(writer.real(item) for item in node.args[:2])), False)
    special = _SPECIAL.get(name)
    if special is None:
        raise StepError(f"there is no kernel text for {node.target}")
    return special(writer, node)


def _view(writer: _Writer, node: fx.Node, name: str) -> Any:
    """One step's tensor under another shape."""
    source: Any = node.args[0]
    if name in ("stack", "cat"):
        if len(source) != 1:
            raise StepError(f"its step joins tensors ({node.target})")
        source = source[0]
    if _numel(node) not in (None, _numel(source)):
        raise StepError(f"its step is not element-wise ({node.target})")
    cell = writer.cells[source]
    if name in _COPIES:
        return _Cell(cell.text, cell.boolean, cell.number)
    return [cell] if name == "unbind" else cell


def _numel(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else None


def _dtype(item: Any) -> torch.dtype | None:
    value = item.meta.get("val") if isinstance(item, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else None


def _filled(node: fx.Node, name: str) -> _Cell:
    value: Any = FILLED.get(name, node.args[0] if name == "scalar_tensor" else node.args[-1])
    boolean = _dtype(node) is torch.bool
    number = f'float("{value}")' if math.isinf(float(value)) or math.isnan(float(value)) else repr(float(value))
    return _Cell(f"tl.full([R, B], {number}, {'tl.int1' if boolean else 'CT'})", boolean)


def _number(value: float) -> str:
    """A number; one that float32 does not hold is made in the compute type, or Triton rounds it."""
    if math.isinf(value) or math.isnan(value):
        return f'float("{value}")'
    if abs(value) > 1e38 or struct.unpack("f", struct.pack("f", value))[0] != value:
        return f"tl.full([1, 1], {value!r}, CT)"
    return repr(value)


def _infix(writer: _Writer, node: fx.Node, name: str) -> _Cell:
    left, right = node.args[:2]
    if node.kwargs.get("rounding_mode") == "trunc":
        return _whole_quotient(writer, node)
    if node.kwargs.get("rounding_mode") is not None:
        raise StepError(f"there is no kernel text for a rounded {node.target}")
    boolean = _dtype(node) is torch.bool
    logical = name.startswith(("bitwise", "logical"))
    if logical and not (_dtype(left) is torch.bool and _dtype(right) is torch.bool):
        raise StepError(f"there is no kernel text for {node.target} of numbers")
    a, b = (writer.cell(item).text if logical else writer.real(item) for item in (left, right))
    alpha: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1)
    if alpha != 1:
        b = f"({_number(float(alpha))} * {b})"
    return writer.name(f"{a} {_INFIX[name]} {b}", boolean or name in _COMPARISONS)


def _whole_quotient(writer: _Writer, node: fx.Node) -> _Cell:
    """A quotient without its fraction. Triton's own division may be off by a last bit, which would lose a spike."""
    a, b = (f"({writer.real(item)} + tl.zeros([R, B], CT))" for item in node.args[:2])
    exact = writer.name(f"(tl.div_rn({a}, {b}) if CT == tl.float32 else {a} / {b})", False).text
    return writer.name(f"tl.where({exact} < 0.0, tl.ceil({exact}), tl.floor({exact})).to(CT)", False)


def _masks(node: fx.Node) -> bool:
    """Whether an index is one boolean tensor."""
    index: Any = node.args[1]
    return len(index) == 1 and _dtype(index[0]) is torch.bool


def _where(writer: _Writer, node: fx.Node) -> _Cell:
    chosen, a, b = node.args[:3]
    return writer.name(f"tl.where({writer.cell(chosen).text}, {writer.real(a)}, {writer.real(b)}).to(CT)", False)


def _masked_fill(writer: _Writer, node: fx.Node) -> _Cell:
    x, mask, value = node.args[:3]
    return writer.name(f"tl.where({writer.cell(mask).text}, {writer.real(value)}, {writer.real(x)}).to(CT)", False)


def _index_put(writer: _Writer, node: fx.Node) -> _Cell:
    if not _masks(node) or len(node.args) > 3 and node.args[3]:
        raise StepError("its step writes at computed places")
    x, index, value = node.args[:3]
    mask = index[0]  # type: ignore[index]
    return writer.name(f"tl.where({writer.cell(mask).text}, {writer.real(value)}, {writer.real(x)}).to(CT)", False)


def _threshold_backward(writer: _Writer, node: fx.Node) -> _Cell:
    grad, x, threshold = (writer.real(item) for item in node.args[:3])
    return writer.name(f"tl.where({x} > {threshold}, {grad}, 0.0).to(CT)", False)


def _clamp(writer: _Writer, node: fx.Node) -> _Cell:
    bounds = [node.args[i] if len(node.args) > i else node.kwargs.get(key) for i, key in ((1, "min"), (2, "max"))]
    text = writer.real(node.args[0])
    for bound, function in zip(bounds, ("maximum", "minimum"), strict=True):
        if bound is not None:
            text = f"tl.{function}({text}, {writer.real(bound)})"
    return writer.name(text, False)


def _leaky_relu(writer: _Writer, node: fx.Node) -> _Cell:
    """Of `leaky_relu(x, slope)`, or its backward, `(grad, x, slope, ...)`."""
    *given, x = (writer.real(item) for item in node.args[: 2 if _is_backward(node) else 1])
    at = len(given) + 1
    slope = writer.real(node.args[at] if len(node.args) > at else node.kwargs.get("negative_slope", 0.01))
    value = given[0] if given else x
    return writer.name(f"tl.where({x} > 0.0, {value}, {slope} * {value}).to(CT)", False)


def _is_backward(node: fx.Node) -> bool:
    return "backward" in str(node.target)


_ATAN = (-8.750608600031904e-1, -16.15753718733365, -75.00855792314705, -122.88666844901362, -64.85021904942025)
_ATAN_BELOW = (1.0, 24.858464901423063, 165.02700983169885, 432.88106049129027, 485.3903996359137, 194.55065714826139)
_TAN_67 = 2.414213562373095


def _atan(writer: _Writer, node: fx.Node) -> _Cell:
    """Cephes' way, as Triton has no atan: near 0 a quotient of polynomials, to which larger numbers are brought."""
    named = lambda text: writer.name(text, False).text  # noqa: E731
    x = writer.real(node.args[0])
    size = named(f"tl.abs({x})")
    large, middle = f"{size} > {_number(_TAN_67)}", f"{size} > {_number(0.66)}"
    near = named(f"tl.where({large}, -1.0 / {size}, tl.where({middle}, ({size} - 1.0) / ({size} + 1.0), {size}))")
    start = named(f"tl.where({large}, {_number(math.pi / 2)}, tl.where({middle}, {_number(math.pi / 4)}, 0.0)).to(CT)")
    square = named(f"{near} * {near}")
    above, below = (named(_polynomial(square, numbers)) for numbers in (_ATAN, _ATAN_BELOW))
    found = named(f"{start} + ({near} + {near} * {square} * {above} / {below})")
    return writer.name(f"tl.where({x} < 0.0, -{found}, {found})", False)


def _polynomial(x: str, numbers: Sequence[float]) -> str:
    """Its value at x, the number of the highest power first."""
    text = _number(numbers[0])
    for number in numbers[1:]:
        text = f"({text} * {x} + {_number(number)})"
    return text


def _pow(writer: _Writer, node: fx.Node) -> _Cell:
    base, exponent = node.args[:2]
    if isinstance(base, fx.Node) and isinstance(exponent, (int, float)):
        return writer.name(_power(writer, writer.real(base), float(exponent)), False)
    if not isinstance(base, fx.Node) and float(base) > 0:  # type: ignore[arg-type]
        return writer.name(f"tl.exp({_number(math.log(float(base)))} * {writer.real(exponent)})", False)  # type: ignore[arg-type]
    raise StepError(f"there is no kernel text for {node.target} with {exponent}")


def _power(writer: _Writer, base: str, exponent: float) -> str:
    """A power as products, with a root for a half; otherwise as torch has it of numbers that are not negative."""
    whole, rest = divmod(abs(exponent), 1)
    if rest not in (0.0, 0.5):
        return f"tl.exp({_number(exponent)} * tl.log({base}))"
    root = f" * tl.sqrt({base})" if rest else ""
    product = f"{_product(writer, base, int(whole))}{root}"
    return f"1.0 / ({product})" if exponent < 0 else product


def _product(writer: _Writer, base: str, count: int) -> str:
    """`count` times the base."""
    if count < 9:
        return " * ".join([base] * count) or "1.0"
    half = writer.name(_product(writer, base, count // 2), False).text
    return " * ".join([half, half, *[base] * (count % 2)])


def _to_copy(writer: _Writer, node: fx.Node) -> _Cell:
    kind = node.kwargs.get("dtype") or _dtype(node)
    text = writer.real(node.args[0])
    if kind in (torch.bfloat16, torch.float16):
        return writer.name(f"{text}.to(tl.{str(kind).removeprefix('torch.')}).to(CT)", False)
    if kind is torch.bool:
        return writer.name(f"{text} != 0", True)
    if kind not in (torch.float32, torch.float64):
        raise StepError(f"its step computes in {kind}")
    return writer.name(text, False)


def _lerp(writer: _Writer, node: fx.Node) -> _Cell:
    a, b, weight = (writer.real(item) for item in node.args[:3])
    return writer.name(f"{a} + {weight} * ({b} - {a})", False)


def _addc(operator: str) -> Callable[[_Writer, fx.Node], _Cell]:
    def write(writer: _Writer, node: fx.Node) -> _Cell:
        x, a, b = (writer.real(item) for item in node.args[:3])
        scale: Any = node.kwargs.get("value", 1)
        return writer.name(f"{x} + {_number(float(scale))} * {a} {operator} {b}", False)

    return write


_SPECIAL: Mapping[str, Callable[[_Writer, fx.Node], _Cell]] = {
    "where": _where,
    "masked_fill": _masked_fill,
    "index_put": _index_put,
    "threshold_backward": _threshold_backward,
    "clamp": _clamp,
    "hardtanh": _clamp,
    "pow": _pow,
    "leaky_relu": _leaky_relu,
    "leaky_relu_backward": _leaky_relu,
    "atan": _atan,
    "_to_copy": _to_copy,
    "lerp": _lerp,
    "addcmul": _addc("*"),
    "addcdiv": _addc("/"),
}
