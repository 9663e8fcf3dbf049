"""Times every kernel of a network on this machine, for plans that a formula would cut badly.

The roofline of a profile knows flops and bytes; how a convolution of 1 x 1 maps, a BatchNorm or the steps of a neuron
really run depends on the library. Here the network's graph runs node by node on the network's own values, each node
forward and backward alone on a clock. Operations with equal text (`kernels.key_of`: operation, shapes, dtypes,
literals) are one kernel, whose time is the median over all its calls: equal layers are met one after the other with
their weights out of the cache, as in a step.

On the CPU with one thread the clock is the process's own, which other processes do not disturb. The result is a
profile, that is data: give all ranks the same one, or the plans they make may differ.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from snnpart import frameworks
from snnpart.costs import MachineProfile
from snnpart.gate.observe import arguments, copies, same_random_numbers
from snnpart.graph import Body, SpikeGraph
from snnpart.ops_time import leaf_paths
from snnpart.passes.analyze.cost import AnalyzeCost
from snnpart.passes.analyze.kernels import key_of, scales_of

ROUNDS = 3
ENOUGH = 9
"""Calls of one kernel that are timed; further ones only run."""
Kernels = Mapping[str, tuple[float, float]]


def with_kernels(profile: MachineProfile, graph: SpikeGraph, inputs: Any, *, rounds: int = ROUNDS) -> MachineProfile:
    """The profile with the times of the graph's kernels for these inputs (nested tensors, on the device to measure).

    Args:
        graph: as `CompiledProgram.source` is, with the `Value` facts of these inputs.
        rounds: how many times the network runs.
    """
    found = measure_kernels(graph, inputs, rounds=rounds)
    roofline = graph.copy()
    AnalyzeCost(profile).run(roofline)
    return replace(
        profile,
        name=f"{profile.name} and {len(found)} kernels",
        kernels={**profile.kernels, **found},
        scales={**profile.scales, **scales_of(roofline, found)},
    )


def measure_kernels(graph: SpikeGraph, inputs: Any, *, rounds: int = ROUNDS) -> Kernels:
    """Microseconds of forward and of backward of each distinct operation, by `kernels.key_of`."""
    body, _ = copies(graph)
    with same_random_numbers(inputs):
        given = arguments(graph, inputs)
        timer = _Timer(body, graph, _device(given))
        for _ in range(rounds):
            timer.run(*given)
    return {key: _medians(times) for key, times in timer.times.items()}


def _medians(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    forward, backward = zip(*times, strict=True)
    return statistics.median(forward), statistics.median(backward)


def _device(given: list[Any]) -> torch.device:
    return next((x.device for x in given if isinstance(x, Tensor)), torch.device("cpu"))


class _Timer(fx.Interpreter):
    """Runs a graph over a body, each operation on a clock."""

    def __init__(self, body: Body, graph: SpikeGraph, device: torch.device) -> None:
        super().__init__(body, graph=graph.graph)
        self.extra_traceback = False
        self.body, self.source, self.device = body, graph, device
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.process_time if alone else time.perf_counter
        self.times: dict[str, list[tuple[float, float]]] = {}
        self.floor = min(self._backward([torch.zeros(1, device=device).requires_grad_().view(1)]) for _ in range(5))

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method", "call_module"):
            return super().run_node(n)
        args, kwargs = _cut(self.fetch_args_kwargs_from_env(n))
        times = self.times.setdefault(key_of(n, self.source), [])
        if len(times) >= ENOUGH:
            return _cut(self._call(n, args, kwargs))
        result, forward = self._timed(lambda: self._call(n, args, kwargs))
        roots = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
        times.append((forward, max(0.0, self._backward(roots) - self.floor) if roots else 0.0))
        return _cut(result)

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        """What the work gives, and the microseconds it takes."""
        self._synchronise()
        started = self.clock()
        result = work()
        self._synchronise()
        return result, 1e6 * (self.clock() - started)

    def _backward(self, roots: Sequence[Tensor]) -> float:
        ones = [torch.ones_like(x) for x in roots]
        return self._timed(lambda: torch.autograd.backward(list(roots), ones))[1]

    def _call(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        for path in leaf_paths(n):
            frameworks.reset_state(self.body.get_submodule(path))
        target: Any = n.target
        if n.op == "call_function":
            return self.body.bound(target)(*args, **kwargs)
        return getattr(self, n.op)(target, args, kwargs)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _cut(values: Any) -> Any:
    """The same tensors as leaves of autograd, so that a backward ends there."""
    own = lambda x: isinstance(x, Tensor) and x.grad_fn is not None  # noqa: E731
    return pytree.tree_map(lambda x: x.detach().requires_grad_() if own(x) else x, values)
