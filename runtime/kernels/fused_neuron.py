"""Runs a fused neuron on the GPU: one kernel forward, one or two backward, generated from the neuron's own step.

The reference is the region itself (`ops_fused`), which is what runs on the CPU. Kernels compute in float32 (float64
where x is), whatever x's dtype: x and the spikes are bfloat16 under autocast, the membranes are not. Kept for backward
are x and two numbers a channel; of sequences longer than `ops_fused.CHUNK` also states at the start of each chunk.

x may be [T*N, ...] or [T, N, ...], or these with samples first, contiguous or with channels last; the result has x's
memory order. Nothing here waits for the device, so that a step can be captured.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from snnpart import ops_fused, shared_statistics
from snnpart.graph import Body
from snnpart.held_tensors import owned
from snnpart.neuron_scan import leaf_name, order_of_scan, step_dims, step_of_region
from snnpart.neuron_step import NeuronStep
from snnpart.ops_fused import FusedNeuron, Parts
from snnpart.ops_time import leaf_paths
from snnpart.runtime.kernels.available import runs_kernels
from snnpart.runtime.kernels.batch_stats import batch_stats
from snnpart.runtime.kernels.choices import Choices, of_this_machine
from snnpart.runtime.kernels.fused_norm import Norm
from snnpart.runtime.kernels.layout import laid, whole
from snnpart.runtime.kernels.neuron_code import Form, backward_source, forward_source
from snnpart.runtime.kernels.sums import affine_gradients, over_programs, parameter_gradient
from snnpart.runtime.kernels.tiles import Tiles, inner_of, tiles_for
from snnpart.runtime.kernels.ways import Region, fastest, kind_of
from snnpart.scan_order import Order
from snnpart.step_run import ROUND, RoundedScan

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_WARPS = 4
_KEPT = {name: getattr(torch, name) for name in ("bfloat16", "float16")}  # rounded states are such numbers already


class Fused:
    """A fused neuron bound over a module: call it with the values of the region's placeholders.

    `reference` is the region over the module, which runs where x is not on a GPU.
    """

    choices: Choices | None = None
    """Instead of this machine's."""

    def __init__(self, target: FusedNeuron, module: Body, reference: Callable[..., Tensor]) -> None:
        self.target, self._module, self._reference = target, module, reference
        self._parts = ops_fused.parts(target.region)
        leaves = {path: module.get_submodule(path) for path in leaf_paths(self._parts.scan)}
        self._order, self._dims = order_of_scan(self._parts.scan, leaves), step_dims(self._parts.scan, leaves) + 1
        places = {node: i for i, node in enumerate(n for n in target.region.nodes if n.op == "placeholder")}
        self._places: dict[Any, int] = dict(places.items())
        self._taken: dict[Any, str] = {}
        self._leaves = {leaf_name(i): path for i, path in enumerate(leaf_paths(self._parts.scan))}

    @cached_property
    def step(self) -> NeuronStep:
        """The neuron's step, recorded when the node first runs."""
        return step_of_region(self.target, self._module)

    def __call__(self, *args: Any) -> Tensor:
        if not self._takes(args):
            return self._reference(*args) if self._state is None else self._rounded(*args)
        return self._run(args)(*args)

    def _takes(self, args: Sequence[Any]) -> bool:
        """Whether x is on a GPU, and running statistics, which kernels update in place, are whole in memory."""
        running = () if self._parts.norm is None else self._parts.norm.args[3:5]
        whole_in_memory = all(x is None or x.is_contiguous() for x in (self._value(item, args) for item in running))
        return runs_kernels(args[self._places[self._parts.x]]) and whole_in_memory

    @property
    def _state(self) -> torch.dtype | None:
        """What states are rounded to, if they are: not while the program is compared with the module."""
        rounds = self.target.way != "compiled" and getattr(self._module, "rounds", True)
        return getattr(torch, self.target.state) if rounds and self.target.state != "float32" else None

    def _rounded(self, *args: Any) -> Tensor:
        """The region with its scan in plain torch, states rounded from step to step."""
        assert self._state is not None
        p = tuple(self._parameter(name, args) for name in self.step.parameters)
        return self._region.rounded(partial(RoundedScan.apply, self.step, self._state), p, args)

    def _run(self, args: Sequence[Any]) -> Callable[..., Tensor]:
        """The function of the way in which these values are computed."""
        way = self.target.way
        if way == "measured":
            rounds = self._state is not None  # which only the kernel does
            way = "kernel" if rounds else self._fastest(args[self._places[self._parts.x]], args)
        return self._ways[way]

    def _fastest(self, x: Tensor, args: Sequence[Any]) -> str:
        """The measured way; the kernel while a CUDA graph is captured, when nothing can be timed."""
        training = self._parts.norm is not None and bool(self._value(self._parts.norm.args[6], args))
        key = (x.shape, x.stride(), x.dtype, training, torch.is_grad_enabled())
        if key not in self._taken:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return "kernel"
            choices = self.choices or of_this_machine(x.device)
            self._taken[key] = fastest(choices, self._kind(args), self._ways, args, self._region)
        return self._taken[key]

    @cached_property
    def _region(self) -> Region:
        return Region(self.target, self._module)

    @cached_property
    def _ways(self) -> dict[str, Callable[..., Tensor]]:
        return {"kernel": self._generated, "compiled": self._region.compiled, "plain": self._region.plain}

    def _kind(self, args: Sequence[Any]) -> str:
        call, _, _ = self._call(args)
        form = call.form(tuple(value.requires_grad for value in call.p))
        texts = (forward_source(call.step, form), backward_source(call.step, form, write=True, reduce=False))
        return kind_of(texts, args[self._places[self._parts.x]], call.inner == 1)

    def _generated(self, *args: Any) -> Tensor:
        call, x, residual = self._call(args)
        weight, bias = (None, None) if call.norm is None else (call.norm.weight, call.norm.bias)
        y: Tensor = _Apply.apply(call, x, residual, weight, bias, *call.p)
        return y.view(call.shape)

    def _call(self, args: Sequence[Any]) -> tuple[_Call, Tensor, Tensor | None]:
        """The call, and x and the residual as its kernels take them."""
        x, residual = args[self._places[self._parts.x]], self._value(self._parts.residual, args)
        x = x.flatten(0, 1) if x.dim() == self._dims else x  # [T, N, ...], or one step [1, N, ...]
        p = tuple(self._parameter(name, args).contiguous() for name in self.step.parameters)
        norm = None if self._parts.norm is None else self._norm(args)
        state = "" if self._state is None else self.target.state
        x = x if inner_of(x) is not None else x.contiguous()
        how = (self.target.steps, norm, self._parts, self._order)
        call = _Call(self.step, state, *how, x, residual is not None, p)
        return call, x, None if residual is None else call.laid_out(residual)

    def _value(self, item: Any, args: Sequence[Any]) -> Any:
        return args[self._places[item]] if item in self._places else item

    def _parameter(self, name: str, args: Sequence[Any]) -> Tensor:
        """A tensor that each step reads: the i-th fixed value of the loop, or a leaf's."""
        if name.isdigit():
            found: Tensor = self._value(self._parts.scan.args[1][int(name)], args)  # type: ignore[index]
            return found
        leaf, _, inside = name.partition(".")
        table, own = owned(self._module, f"{self._leaves[leaf]}.{inside}")
        return table[own]  # type: ignore[no-any-return]

    def _norm(self, args: Sequence[Any]) -> Norm:
        assert self._parts.norm is not None
        kind: Any = self._parts.norm.target
        weight, bias, *rest = (self._value(item, args) for item in self._parts.norm.args[1:9])
        return Norm(kind, self.target.steps, whole(weight), whole(bias), *rest)


class _Call:
    """One call, for x [T*N, ...] (or, shared by all steps, [N, ...]) as the kernels take it: shapes and BatchNorm's
    numbers. It lives until backward and holds no tensor of x's size: what backward needs is saved apart."""

    def __init__(
        self, step: NeuronStep, state: str, steps: int, norm: Norm | None, parts: Parts, order: Order, x: Tensor,
        residual: bool, p: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        self.step, self.state, self.steps, self.norm, self.shared, self.p = step, state, steps, norm, parts.shared, p
        self.numel, self.inner, self.residual = x.numel(), inner_of(x) or 1, residual
        outer, rest = x.shape[0] // (1 if parts.shared else self.steps), x.shape[1:]
        self.merged = (self.steps * outer, *rest)
        self.samples_first, self.features = order.samples_first, torch.Size(rest).numel()
        stacked = (outer, self.steps, *rest) if order.samples_first else (self.steps, outer, *rest)
        self.shape = stacked if parts.stacked != order.merged else self.merged
        self.channelled = tuple(value.numel() > 1 for value in p)
        self.channels = x.shape[1] if norm is not None or any(self.channelled) else 1
        self.eps = 0.0 if norm is None else norm.eps
        self.apart = self.steps if norm is not None and norm.per_step else 1
        self.over_ranks = shared_statistics.current() if norm is not None and norm.training else None
        self.numbers: Tensor | None = None

    @property
    def count(self) -> int:
        """Numbers of this rank that one mean of a channel is taken of."""
        return self.numel // self.merged[1] // self.apart

    @property
    def step_numel(self) -> int:
        """Elements of one step."""
        return self.numel // (1 if self.shared else self.steps)

    def empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor for the result [T*N, ...], where `like` is, in x's memory order."""
        shape = self.merged
        if self.inner == 1 and len(shape) > 2:
            return like.new_empty((shape[0], *shape[2:], shape[1]), dtype=dtype).movedim(-1, 1)
        return like.new_empty(shape, dtype=dtype)

    def laid_out(self, value: Tensor) -> Tensor:
        """A value of the result's size as a merged tensor in x's memory order."""
        flat = value.reshape(self.merged)
        if inner_of(flat) == self.inner:
            return flat
        return laid(flat, lambda value: self.empty(value, value.dtype))

    def form(self, learned: tuple[bool, ...]) -> Form:
        norm = self.norm
        return Form(
            steps=self.steps,
            norm=norm is not None,
            affine=norm is not None and norm.weight is not None,
            batch=norm is not None and norm.batch,
            residual=self.residual,
            channelled=self.channelled,
            learned=learned,
            shared=self.shared,
            state=self.state,
            per_step=self.apart > 1,
            samples_first=self.samples_first,
        )

    def tiles(self, numel: int, size: int, *, sums: bool) -> Tiles:
        """Tiles over `numel` elements of x."""
        inner = 1 if self.channels == 1 else self.inner
        total = self.step_numel * self.steps
        return tiles_for(numel // self.channels, self.channels, inner, size, total, sums=sums)


def _size(form: Form, backward: bool) -> int:
    """Numbers in a tile: fewer where more steps stand in registers, and in backward, which has all their states there
    (512 instead of 1024 took 4 steps from 2.5 to 3.1 TB/s on an H200)."""
    if form.per_step:
        return 512 if form.chunk <= 4 else 256
    return 512 if backward or form.chunk > 4 else 1024


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, residual: Any, weight: Any, bias: Any, *p: Tensor) -> Tensor:
        ctx.call, form = call, call.form((False,) * len(p))
        mean, var = _statistics(call, form, x)
        tiles = call.tiles(call.step_numel, _size(form, backward=False), sums=False)
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        y = call.empty(x, dtype)
        keeps = form.chunks > 1 and any(ctx.needs_input_grad)
        compute = torch.float64 if x.dtype is torch.float64 else torch.float32
        states = (form.chunks - 1, call.step.states, call.step_numel) if keeps else 1
        kept = x.new_empty(states, dtype=_KEPT.get(call.state, compute))
        kernel = _kernel(forward_source(call.step, form), "forward")
        kernel[tiles.grid](
            x, x if residual is None else residual, y, kept, *_or(x, mean, var, weight, bias), *p, *_sizes(tiles),
            call.features, **tiles.constants(compute), EPS=call.eps, ROUND=ROUND[compute], KEEP=keeps, num_warps=_WARPS,
        )  # fmt: skip
        ctx.save_for_backward(x, kept, mean, var, weight, bias, *p)
        ctx.residual = None if residual is None else residual.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        call: _Call = ctx.call
        x, kept, mean, var, weight, bias, *p = ctx.saved_tensors
        needs = ctx.needs_input_grad
        form = call.form(tuple(needs[5:]))
        dy = call.laid_out(dy)
        launch = _Backward(call, form, (x, kept, mean, var, weight, bias), tuple(p), dy)
        sums, dx = launch.run()
        named = dict(zip(form.sums, sums, strict=True))
        grads = [parameter_gradient(named.get(f"sum_p{i}"), value) for i, value in enumerate(p)]
        affine = affine_gradients(form, named, weight, bias) if form.affine else (None, None)
        passed = None if ctx.residual is None else dy.to(ctx.residual)
        return (None, dx, passed, *affine, *grads)


@dataclass(frozen=True)
class _Backward:
    """The kernels of one backward."""

    call: _Call
    form: Form
    saved: tuple[Any, ...]
    p: tuple[Tensor, ...]
    dy: Tensor

    def run(self) -> tuple[Tensor | tuple[()], Tensor]:
        """The sums over channels, in the form's order, and x's gradient."""
        if not self.form.sums:
            return (), self._launch(None, write=True, reduce=False)[1]
        if not self.form.batch:
            return self._launch(None, write=True, reduce=True)
        sums, _ = self._launch(None, write=False, reduce=True)
        return sums, self._launch(self._of_all_ranks(sums), write=True, reduce=False)[1]

    def _of_all_ranks(self, sums: Tensor) -> Tensor:
        """The norm's sums over the ranks that share its statistics, for this rank's `count` instead of all numbers."""
        call = self.call
        if call.over_ranks is None or call.numbers is None:
            return sums
        share = (call.count / call.numbers).to(sums.dtype)
        return call.over_ranks(sums[: 2 * call.apart]) * share

    def _launch(self, sums: Tensor | None, *, write: bool, reduce: bool) -> tuple[Tensor, Tensor]:
        call, (x, kept, *norm) = self.call, self.saved
        tiles = call.tiles(call.step_numel, _size(self.form, backward=True), sums=reduce)
        compute = torch.float64 if x.dtype is torch.float64 else torch.float32
        dx = torch.empty_like(x) if write else x
        parts = x.new_empty((len(self.form.sums), tiles.programs, tiles.channels) if reduce else 1, dtype=compute)
        kernel = _kernel(backward_source(call.step, self.form, write=write, reduce=reduce), "backward")
        count = call.count if self.form.norm else 1  # an int: a float would be one of 32 bits
        kernel[tiles.grid](
            x, self.dy, dx, kept, x if sums is None else sums, parts, *_or(x, *norm), *self.p,
            *_sizes(tiles), call.features, count, tiles.tiles, **tiles.constants(compute), EPS=call.eps,
            ROUND=ROUND[compute], num_warps=_WARPS,
        )  # fmt: skip
        return over_programs(parts) if reduce else parts, dx


def _or(x: Tensor, *values: Tensor | None) -> list[Tensor]:
    """The tensors, and x where a kernel that does not read it is given a pointer all the same."""
    return [x if value is None else value for value in values]


def _sizes(tiles: Tiles) -> tuple[int, int, int]:
    return tiles.rows, tiles.channels, tiles.inner


def _statistics(call: _Call, form: Form, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The mean and variance that BatchNorm uses, with its counter and running statistics brought up to date."""
    norm = call.norm
    if norm is None or not form.batch:
        return (None, None) if norm is None else (norm.running_mean, norm.running_var)
    if norm.training and norm.counter is not None:
        norm.counter.add_(norm.updates)
    tiles = call.tiles(call.numel // call.apart, 1024, sums=True)
    tracked = (norm.running_mean, norm.running_var) if norm.training and call.over_ranks is None else (None, None)
    mean, var = batch_stats(x, tiles, *tracked, norm.factor, copies=norm.copies, steps=call.apart)
    return (mean, var) if call.over_ranks is None else _statistics_of_ranks(call, norm, mean, var)


def _statistics_of_ranks(call: _Call, norm: Norm, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's statistics [steps, C] made those of all ranks, by which the running ones move."""
    assert call.over_ranks is not None
    mean, var, call.numbers = shared_statistics.merged(mean, var, call.count, call.over_ranks)
    of_all = (call.numbers * norm.copies).to(var.dtype)
    shared_statistics.track(norm.running_mean, mean, norm.factor)
    shared_statistics.track(norm.running_var, var * of_all / (of_all - 1).clamp(min=1), norm.factor)
    return mean, var


@cache
def _kernel(source: str, name: str) -> Any:
    """The Triton function of a text. Texts have no file: `linecache` is where Triton finds their lines."""
    file = f"<snnpart kernel {abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {"tl": tl, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope[name])
