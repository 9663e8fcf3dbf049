"""Runs the text that kernels are generated from (`step_code`) in plain torch, with states rounded between steps.

It is what a fused neuron's kernel computes, for a CPU, where `neuron_dtype=` has no kernel: `_Language` has the names
of `triton.language` that the text uses, over tensors of any shape. States are rounded as they go from a step to the
next one, and gradients pass the rounding unchanged. Backward computes the rounded states again.

    x, y [T, N, C, ...]        p: one number, or one for each channel, as C behind dims of size 1 or alone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from snnpart.neuron_step import NeuronStep
from snnpart.step_code import write_step

ROUND = {torch.float32: 1.5 * 2.0**23, torch.float64: 1.5 * 2.0**52}
"""Added and taken away again, it rounds a number of this dtype to a whole one."""

_SAME = ["abs", "exp", "log", "sqrt", "sin", "cos", "erf", "floor", "ceil", "where"]


class RoundedScan(torch.autograd.Function):
    """All steps of a neuron: y of x and the tensors p that each step reads, states rounded to `dtype`."""

    @staticmethod
    def forward(ctx: Any, step: NeuronStep, dtype: torch.dtype, x: Tensor, *p: Tensor) -> Tensor:
        ctx.step, ctx.dtype = step, dtype
        ctx.save_for_backward(x, *p)
        return _forward(step, dtype, x, [_as_steps(value, x) for value in p])[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, *p = ctx.saved_tensors
        spread = [_as_steps(value, x) for value in p]
        _, states = _forward(ctx.step, ctx.dtype, x, spread)
        dx, dp = _backward(ctx.step, x, spread, states, dy)
        sums = (grad.sum_to_size(wide.shape) for grad, wide in zip(dp, spread, strict=True))
        return (None, None, dx, *(grad.reshape(own.shape) for grad, own in zip(sums, p, strict=True)))


def _as_steps(p: Tensor, x: Tensor) -> Tensor:
    """A parameter [C] or [] in the form in which a step of x takes it."""
    return p.reshape(-1, *(1,) * max(x.dim() - 3, 0)).to(x.dtype) if p.numel() > 1 else p.reshape(()).to(x.dtype)


def _forward(
    step: NeuronStep, dtype: torch.dtype, x: Tensor, p: Sequence[Tensor]
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Outputs, and the states before each step."""
    states: list[tuple[Tensor, ...]] = [()]
    made: list[Tensor] = []
    for t, one in enumerate(x):
        *after, y = _run((step.next if t else step.first).forward, (one, *p, *states[-1]), one)
        states.append(tuple(s.to(dtype).to(one.dtype) for s in after))
        made.append(y)
    return torch.stack(made), states


def _backward(
    step: NeuronStep, x: Tensor, p: Sequence[Tensor], states: Sequence[tuple[Tensor, ...]], dy: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The gradients of x, and those of p element by element, over all steps."""
    zero = torch.zeros_like(x[0])
    ds, dx, dp = [zero] * step.states, [zero] * len(x), [zero for _ in p]
    for t in reversed(range(len(x))):
        one = (step.next if t else step.first).backward
        first, *rest = _run(one, (x[t], *p, *states[t], *ds, dy[t]), zero)
        dx[t] = zero if first is None else first
        dp = [total if own is None else total + own for total, own in zip(dp, rest[: len(p)], strict=True)]
        ds = [zero if own is None else own for own in rest[len(p) :]]
    return torch.stack(dx), dp


def _run(graph: fx.Graph, args: Sequence[Tensor], like: Tensor) -> list[Any]:
    """The results of a recorded graph, of the shape of `like`; None where there is none."""
    made = _function(graph)(_Language(like), like.dtype, ROUND[like.dtype], *args)
    return [None if value is None else value.expand_as(like) for value in made]


@cache
def _function(graph: fx.Graph) -> Callable[..., Any]:
    """The graph's text as a Python function."""
    names = [f"a{i}" for i in range(sum(node.op == "placeholder" for node in graph.nodes))]
    lines, results = write_step(graph, names, "c")
    head = f"def step({', '.join(['tl', 'CT', 'ROUND', *names])}):\n    R = B = 1\n"
    body = "".join(f"    {line}\n" for line in lines)
    scope: dict[str, Any] = {}
    exec(compile(f"{head}{body}    return [{', '.join(map(str, results))}]\n", "<snnpart step>", "exec"), scope)
    found: Callable[..., Any] = scope["step"]
    return found


class _Language:
    """What the text calls as `tl`, for values that broadcast to the shape of `like`."""

    int1, bfloat16, float16, float32, float64 = torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64

    def __init__(self, like: Tensor) -> None:
        self._like = like

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, name) if name in _SAME else None
        if function is None:
            raise AttributeError(name)
        return lambda *args: function(*map(self._tensor, args))

    def _tensor(self, item: Any) -> Tensor:
        return item if isinstance(item, Tensor) else self._like.new_tensor(item)

    def maximum(self, a: Any, b: Any) -> Tensor:
        return torch.maximum(self._tensor(a), self._tensor(b))

    def div_rn(self, a: Any, b: Any) -> Tensor:
        return self._tensor(a) / self._tensor(b)

    def minimum(self, a: Any, b: Any) -> Tensor:
        return torch.minimum(self._tensor(a), self._tensor(b))

    def zeros(self, _: Any, dtype: torch.dtype) -> Tensor:
        return torch.zeros((), dtype=dtype, device=self._like.device)

    def full(self, _: Any, value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((), value, dtype=dtype, device=self._like.device)
