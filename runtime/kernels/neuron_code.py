"""The text of the Triton kernels of one fused neuron: norm, all T steps of a neuron, residual.

A program of a kernel has a tile of R rows (samples and places) and B channels of one step in registers and goes through
all steps. x is [T, rows, channels] in memory, channels-last, or [T, outer, channels, inner] where `inner` is not 1; a
channel's mean and variance, and a neuron's parameters, are read once. With samples first the steps of a sample lie
behind each other instead, `features` numbers apart.

Forward: x_t -> (x_t - mean) / sqrt(var + eps) * weight + bias -> step -> y_t (+ residual_t). Backward reads x again,
computes the states again up to each step, and runs the step's vector-Jacobian product from the last step to the first.
With the batch's own statistics it runs twice: the first time it leaves only sums over a channel (of the gradient, of
the gradient times the normalised x, of those of the parameters), the second time it has them and writes x's gradient.
That moves less memory than keeping the gradient between. Where every step has statistics of its own, the sums are each
step's too, and all steps stand in the text.

Up to `ops_fused.CHUNK` steps stand in the text one after the other, with the states between them in registers. Longer
sequences run in chunks: forward keeps the states at the start of each, in the dtype that they are rounded to, backward
computes those inside again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec
from weakref import WeakKeyDictionary

from snnpart.neuron_step import NeuronStep, Pass
from snnpart.ops_fused import chunk_of
from snnpart.step_code import write_step

P = ParamSpec("P")


@dataclass(frozen=True)
class Form:
    """What a kernel is made for. `channelled[i]`: parameter i has a number for each channel; `learned` likewise those
    that want a gradient. `shared`: x is one step, the same at each. `state` is the dtype that states are rounded to
    between steps, by Triton's name. `samples_first`: x is [N, T, ...]."""

    steps: int
    norm: bool
    affine: bool
    batch: bool
    residual: bool
    channelled: tuple[bool, ...]
    learned: tuple[bool, ...]
    shared: bool = False
    state: str = ""
    per_step: bool = False
    samples_first: bool = False

    @property
    def chunk(self) -> int:
        """How many steps stand in the text at once."""
        return self.steps if self.per_step else chunk_of(self.steps)

    @property
    def chunks(self) -> int:
        return self.steps // self.chunk

    @property
    def sums(self) -> tuple[str, ...]:
        """What backward sums over each channel, in order."""
        norm = ("sum_dy", "sum_dyx") if self.norm and (self.affine or self.batch) else ()
        marked = (f"{name}{mark}" for name in norm for mark in self.marks)
        return (*marked, *(f"sum_p{i}" for i, learned in enumerate(self.learned) if learned))

    @property
    def marks(self) -> tuple[str, ...]:
        """What is behind the names of the norm's numbers: one kind for all steps, or one a step."""
        return tuple(f"_{t}" for t in range(self.steps)) if self.per_step else ("",)

    def mark(self, t: int) -> str:
        """That of step t of the chunk."""
        return self.marks[t if self.per_step else 0]


def written_once(
    source: Callable[Concatenate[NeuronStep, Form, P], str],
) -> Callable[Concatenate[NeuronStep, Form, P], str]:
    """Keep the texts of a step as long as the step: writing one takes far longer than launching its kernel does."""
    texts: WeakKeyDictionary[NeuronStep, dict[tuple[object, ...], str]] = WeakKeyDictionary()

    @wraps(source)
    def kept(step: NeuronStep, form: Form, *args: P.args, **how: P.kwargs) -> str:
        own, key = texts.setdefault(step, {}), (form, args, *how.items())
        if key not in own:
            own[key] = source(step, form, *args, **how)
        return own[key]

    return kept


@written_once
def forward_source(step: NeuronStep, form: Form) -> str:
    """The forward kernel, named `forward`."""
    names = ["x", "residual", "y", "kept", *_NORM, *_names(step)]
    sizes = "rows, channels, inner, features"
    constants = _constants("EPS INNER R B CT ROUND KEEP WIDE")
    lines = [f"def forward({', '.join(names)}, {sizes}, {constants}):"]
    lines += _indent([_FORWARD_ROW, *_tile_lines(form), *_channel_lines(step, form), *_shared_x(form)])
    lines += _indent(_forward_chunk(step, form, True))
    if form.chunks > 1:
        lines += [f"    for chunk in range(1, {form.chunks}):"]
        lines += _indent(_keep_lines(step, form), 2) + _indent(_forward_chunk(step, form, False), 2)
    return "\n".join(lines) + "\n"


@written_once
def backward_source(step: NeuronStep, form: Form, *, write: bool, reduce: bool) -> str:
    """The backward kernel, named `backward`: `write` x's gradient, `reduce`: leave sums over channels in `parts`."""
    names = ["x", "dy", "dx", "kept", "sums", "parts", *_NORM, *_names(step)]
    sizes = "rows, channels, inner, features, count, tiles"
    constants = _constants("EPS INNER R B CT ROUND WIDE")
    lines = [f"def backward({', '.join(names)}, {sizes}, {constants}):"]
    lines += _indent(["ch = tl.program_id(1) * B + tl.arange(0, B)", *_channel_lines(step, form)])
    lines += _indent(_sum_loads(form) if write and form.batch else [])
    lines += _indent([f"{name} = tl.zeros([R, B], CT)" for name in form.sums] if reduce else [])
    lines += ["    for tile in range(tiles):"]
    body = [_BACKWARD_ROW, *_tile_lines(form, channel=False), *_shared_x(form)]
    body += [f"ds{j} = tl.zeros([R, B], CT)" for j in range(step.states)]
    body += ["total = tl.zeros([R, B], CT)"] if form.shared and write else []
    lines += _indent(body, 2)
    if form.chunks > 1:
        lines += [f"        for back in range({form.chunks - 1}):", f"            chunk = {form.chunks - 1} - back"]
        lines += _indent([*_load_kept(step, form), *_backward_chunk(step, form, False, write, reduce)], 3)
    lines += _indent(_backward_chunk(step, form, True, write, reduce), 2)
    lines += _indent(_write_dx(form, "total", "x_h", "at", "") if form.shared and write else [], 2)
    return "\n".join([*lines, *_indent(_store_sums(form) if reduce else [])]) + "\n"


_NORM = ("mean", "var", "weight", "bias")
_FORWARD_ROW = "row = (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * R + tl.arange(0, R)"
_BACKWARD_ROW = (
    "row = ((tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * tiles + tile) * R + tl.arange(0, R)"
)


def _names(step: NeuronStep) -> list[str]:
    return [f"p{i}" for i in range(len(step.parameters))]


def _constants(names: str) -> str:
    return ", ".join(f"{name}: tl.constexpr" for name in names.split())


def _indent(lines: Iterable[str], depth: int = 1) -> list[str]:
    return ["    " * depth + line for line in lines]


def _tile_lines(form: Form, channel: bool = True) -> Iterator[str]:
    if channel:
        yield "ch = tl.program_id(1) * B + tl.arange(0, B)"
    yield "mask = (row < rows)[:, None] & (ch < channels)[None, :]"
    yield "place = row * channels if INNER == 1 else (row // inner) * (channels * inner) + row % inner"
    yield "at = place[:, None] + (ch if INNER == 1 else ch * inner)[None, :]"
    yield "step = (rows.to(tl.int64) if WIDE else rows) * channels"
    yield "at_kept, step_kept = at, step"
    if form.samples_first:
        yield f"at += at // features * features * {form.steps - 1}"
        yield "step = tl.cast(features, tl.int64) if WIDE else features"


def _channel_lines(step: NeuronStep, form: Form) -> Iterator[str]:
    """What is read once: statistics, weight and bias, and the neuron's parameters, as tiles."""
    load = "tl.load({0} + ch, mask=ch < channels, other={1}).to(CT)[None, :]"
    if form.norm:
        for t, mark in enumerate(form.marks):
            yield f"m{mark} = {load.format(f'mean + {t} * channels', 0.0)}"
            yield f"rs{mark} = 1.0 / tl.sqrt({load.format(f'var + {t} * channels', 1.0)} + tl.full([1, 1], EPS, CT))"
        yield f"w = {load.format('weight', 1.0)}" if form.affine else "w = tl.full([1, B], 1.0, CT)"
        yield f"b = {load.format('bias', 0.0)}" if form.affine else "b = tl.full([1, B], 0.0, CT)"
    for i in range(len(step.parameters)):
        value = load.format(f"p{i}", 0.0) if form.channelled[i] else f"tl.load(p{i}).to(CT)"
        yield f"q{i} = {value} + tl.zeros([R, B], CT)"


def _chunk_start(form: Form, first: bool) -> str:
    return "0" if first else f"chunk * {form.chunk}"


def _shared_x(form: Form) -> Iterator[str]:
    """The one x of all steps."""
    if form.shared:
        yield from _normalised(form, "at", "x_", "")


def _load_x(form: Form, start: str, t: int) -> Iterator[str]:
    """One step's x as `x<t>`, and normalised, before weight and bias, as `x<t>h`."""
    if not form.shared:
        yield from _normalised(form, f"at + ({start} + {t}) * step", f"x{t}", form.mark(t))
    else:
        yield f"x{t} = x_"
        yield from [f"x{t}h = x_h"] if form.norm else []


def _normalised(form: Form, place: str, name: str, mark: str) -> Iterator[str]:
    yield f"{name}x = tl.load(x + {place}, mask=mask, other=0.0).to(CT)"
    if form.norm:
        yield f"{name}h = ({name}x - m{mark}) * rs{mark}"
        yield f"{name} = {name}h * w + b"
    else:
        yield f"{name} = {name}x"


def _one(step: NeuronStep, first: bool, t: int) -> Pass:
    return step.first if first and t == 0 else step.next


def _prefix(letter: str, first: bool, t: int) -> str:
    """Names inside a step: those of the first chunk differ from those in the loop over chunks, as types may."""
    return f"{letter.upper() if first else letter}{t}_"


def _run(step: NeuronStep, form: Form, first: bool, t: int, x: str, states: list[str]) -> tuple[list[str], list[str]]:
    """One step forward: its lines, and the names of the states after it and of its output."""
    given = [x, *(f"q{i}" for i in range(len(step.parameters))), *([] if first and t == 0 else states)]
    lines, results = write_step(_one(step, first, t).forward, given, _prefix("f", first, t))
    names = [*(f"s{t}_{j}" for j in range(step.states)), f"y{t}"]
    for name, result in zip(names, results, strict=True):
        rounded = f"{_to_state(form)}.to(CT)" if not name.startswith("y") else ""
        lines.append(f"{name} = ({result}){rounded} + tl.zeros([R, B], CT)")
    return lines, names


def _to_state(form: Form) -> str:
    """A state's way to the dtype that it is rounded to: through float32, as torch goes."""
    return f".to(tl.float32).to(tl.{form.state})" if form.state else ""


def _forward_chunk(step: NeuronStep, form: Form, first: bool) -> list[str]:
    lines: list[str] = []
    start, states = _chunk_start(form, first), [f"s{j}" for j in range(step.states)]
    for t in range(form.chunk):
        lines += _load_x(form, start, t)
        own, (*states, y) = _run(step, form, first, t, f"x{t}", states)
        lines += own
        if form.residual:
            lines.append(f"{y} += tl.load(residual + at + ({start} + {t}) * step, mask=mask, other=0.0).to(CT)")
        lines.append(f"tl.store(y + at + ({start} + {t}) * step, {y}.to(y.dtype.element_ty), mask=mask)")
    return lines + [f"s{j} = {name}" for j, name in enumerate(states)]


def _place_kept(step: NeuronStep, j: int) -> str:
    return f"kept + ((chunk - 1) * {step.states} + {j}) * step_kept + at_kept"


def _keep_lines(step: NeuronStep, form: Form) -> list[str]:
    if not step.states:
        return []
    stores = [f"tl.store({_place_kept(step, j)}, s{j}{_to_state(form)}, mask=mask)" for j in range(step.states)]
    return ["if KEEP:", *_indent(stores)]


def _load_kept(step: NeuronStep, form: Form) -> list[str]:
    wide = ".to(tl.float32).to(CT)" if form.state else ".to(CT)"
    return [f"s{j} = tl.load({_place_kept(step, j)}, mask=mask, other=0.0){wide}" for j in range(step.states)]


def _backward_chunk(step: NeuronStep, form: Form, first: bool, write: bool, reduce: bool) -> list[str]:
    lines: list[str] = []
    start = _chunk_start(form, first)
    before: list[list[str]] = [[f"s{j}" for j in range(step.states)]]
    for t in range(form.chunk):
        lines += _load_x(form, start, t)
        if t < form.chunk - 1:
            own, (*states, _) = _run(step, form, first, t, f"x{t}", before[-1])
            lines += own
            before.append(states)
    for t in reversed(range(form.chunk)):
        lines.append(f"g{t} = tl.load(dy + at + ({start} + {t}) * step, mask=mask, other=0.0).to(CT)")
        lines += _pull(step, form, first, t, before[t], reduce)
        if write and form.shared:
            lines.append(f"total += d{t}")
        elif write:
            lines += _write_dx(form, f"d{t}", f"x{t}h", f"at + ({start} + {t}) * step", form.mark(t))
    return lines


def _pull(step: NeuronStep, form: Form, first: bool, t: int, states: list[str], reduce: bool) -> Iterator[str]:
    """One step's vector-Jacobian product: dx of the step as `d{t}`, sums of parameters, and the state's cotangents."""
    q, ds = [f"q{i}" for i in range(len(step.parameters))], [f"ds{j}" for j in range(step.states)]
    given = [f"x{t}", *q, *([] if first and t == 0 else states), *ds, f"g{t}"]
    lines, (dx, *rest) = write_step(_one(step, first, t).backward, given, _prefix("b", first, t))
    yield from lines
    yield f"d{t} = {dx or 'tl.zeros([R, B], CT)'}"
    if reduce:
        for i, own in enumerate(rest[: len(q)]):
            if form.learned[i] and own:
                yield f"sum_p{i} += tl.where(mask, {own}, 0.0)"
        mark = form.mark(t)
        if f"sum_dy{mark}" in form.sums:
            yield f"sum_dy{mark} += tl.where(mask, d{t}, 0.0)"
            yield f"sum_dyx{mark} += tl.where(mask, d{t} * x{t}h, 0.0)"
    if not (first and t == 0):
        after = [f"n{t}_{j} = ({own or 0.0}) + tl.zeros([R, B], CT)" for j, own in enumerate(rest[len(q) :])]
        yield from after
        yield from (f"ds{j} = n{t}_{j}" for j in range(step.states))


def _write_dx(form: Form, value: str, normalised: str, place: str, mark: str) -> Iterator[str]:
    if form.norm:
        own = f"{value} - c0{mark} - {normalised} * c1{mark}" if form.batch else value
        value = f"rs{mark} * w * ({own})"
    yield f"tl.store(dx + {place}, ({value}).to(dx.dtype.element_ty), mask=mask)"


def _sum_loads(form: Form) -> list[str]:
    load = "tl.load(sums + {0} * channels + ch, mask=ch < channels, other=0.0).to(CT)[None, :] / count"
    names = [f"c{i}{mark}" for i in range(2) for mark in form.marks]
    return [f"{name} = {load.format(i)}" for i, name in enumerate(names)]


def _store_sums(form: Form) -> Iterator[str]:
    for i, name in enumerate(form.sums):
        at = f"({i} * tl.num_programs(0) + tl.program_id(0)) * channels + ch"
        yield f"tl.store(parts + {at}, tl.sum({name}, axis=0), mask=ch < channels)"
