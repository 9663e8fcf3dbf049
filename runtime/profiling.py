"""Where the time of a train step goes: by module and pass, launches, communication, beside the prediction.

Two launches of one program. In the first its stage graphs carry marks: each operation runs inside a `record_function`
that names module and pass, and what the profiler sees of a backward belongs to the forward with its sequence number.
Those steps are eager. The second, without marks, runs as it would in training; from it come the time of a step, the
time in which the device computes, and the time in which it communicates.

On the CPU operations are what kernels are on a GPU, and nothing can be said of gaps between them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile, record_function

from snnpart.costs import MachineProfile, synchronise
from snnpart.facts import Cost, Origin, get
from snnpart.program import CompiledProgram
from snnpart.runtime import waits
from snnpart.runtime.launch import TIMEOUT
from snnpart.runtime.ranks import join
from snnpart.timeline import predicted

MARK = "snnpart|"
_BACKWARD = 1
"""torch's RecordScope of a backward function."""
_COMMUNICATION = ("nccl", "gloo", "c10d::")
_MESSAGE = "sendrecv"
"""In the name of NCCL's kernel that sends and receives."""
OTHER, OPTIMIZER = "(other)", "(optimizer)"
PROFILED = 3
"""Steps that a profiler watches; what it says is of one."""
Step = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One module under one pass, all times in microseconds."""

    module: str
    made_by: str
    forward: float
    backward: float
    predicted: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Whole:
    """A step as it runs, in microseconds: from start to end, with a kernel under way, communicating; `kernels` by name.
    `waiting`: for other stages.

    Kernels that run at the same time count once in `busy`, each for itself in `kernels`.
    """

    step: float
    busy: float
    communication: float
    kernels: Mapping[str, float] = field(default_factory=dict)
    waiting: float = 0.0

    @property
    def gaps(self) -> float:
        """The share of the step in which no kernel runs, 0 to 1."""
        return max(0.0, 1 - self.busy / self.step)


_entered: list[Any] = []


def enter(label: str) -> None:
    """Begin a range of the profiler."""
    _entered.append(record_function(label).__enter__())


def leave() -> None:
    """End the range that was begun last."""
    _entered.pop().__exit__(None, None, None)


def marked(compiled: CompiledProgram) -> CompiledProgram:
    """The program with marks around the operations of its stage graphs."""
    stages = {at: replace(program, graph=_marked(program.graph)) for at, program in compiled.stages.items()}
    return replace(compiled, stages=stages)


def _marked(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    result = made.graph_copy(graph, {})
    if result is not None:
        made.output(result)
    for node in [node for node in made.nodes if node.op.startswith("call_")]:
        with made.inserting_before(node):
            made.call_function(enter, (_label(node),))
        with made.inserting_after(node):
            made.call_function(leave, ())
    return made


def _label(node: fx.Node) -> str:
    origin = get(node, Origin) or Origin()
    return f"{MARK}{origin.module or '(network)'}|{origin.made_by}"


def by_module(step: Step, compiled: CompiledProgram, device: torch.device) -> list[Row]:
    """The rows of one marked step, the longest first."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as seen:
        step()
        synchronise(device)
    times = _times(list(seen.events()), device.type == "cuda")
    costs: dict[tuple[str, str], float] = defaultdict(float)
    for node in compiled.source.graph.nodes:
        cost = get(node, Cost)
        if cost is not None and node.op.startswith("call_"):
            module, _, made_by = _label(node).removeprefix(MARK).partition("|")
            costs[module, made_by] += cost.us
    rows = [Row(*at, *found, costs.get(at, 0.0)) for at, found in times.items()]
    return sorted(rows, key=lambda row: -row.total)


def _times(events: Sequence[Any], cuda: bool) -> dict[tuple[str, str], tuple[float, float]]:
    """Forward and backward time of each (module, pass)."""
    forward_of: dict[int, tuple[str, str]] = {}
    for event in events:
        at = _mark_of(event)
        if at is not None and event.sequence_nr >= 0 and event.scope != _BACKWARD:
            forward_of.setdefault(event.sequence_nr, at)
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        own = event.self_device_time_total if cuda else event.self_cpu_time_total
        if own <= 0 or event.device_type != torch.autograd.DeviceType.CPU:
            continue
        at, backward = _belongs(event, forward_of)
        found[at][backward] += own
    return {at: (forward, backward) for at, (forward, backward) in found.items()}


def _above(event: Any) -> Iterator[Any]:
    """The event and what encloses it, from the inside out."""
    while event is not None:
        yield event
        event = event.cpu_parent


def _mark_of(event: Any) -> tuple[str, str] | None:
    for outer in _above(event):
        if outer.name.startswith(MARK):
            module, _, made_by = outer.name.removeprefix(MARK).partition("|")
            return module, made_by
    return None


def _belongs(event: Any, forward_of: dict[int, tuple[str, str]]) -> tuple[tuple[str, str], bool]:
    """The module and pass of an event, and whether it is part of a backward."""
    at = _mark_of(event)
    if at is not None:
        return at, False
    for outer in _above(event):
        if outer.scope == _BACKWARD and outer.sequence_nr in forward_of:
            return forward_of[outer.sequence_nr], True
        if outer.name.startswith("Optimizer.step"):
            return (OPTIMIZER, ""), False
    return (OTHER, ""), False


def whole(step: Step, device: torch.device, repeats: int = 10, trace: Path | None = None) -> Whole:
    """A step as it runs; it has run often enough before. A Chrome trace of `PROFILED` steps is written to `trace`."""
    cuda = device.type == "cuda"
    with waits.counted() as waited:
        us = 1e6 * timed(step, device, repeats)
    events = watched(step, device, trace)
    talking = [event for event in events if any(word in event.name.lower() for word in _COMMUNICATION)]
    busy, communication = (_union([event.time_range for event in some]) / PROFILED for some in (events, talking))
    waiting = _messages_alone(events) / PROFILED if cuda else 1e6 * sum(waited) / repeats
    return Whole(us, min(busy, us), min(communication, us), _by_name(events, cuda), min(waiting, us))


def _messages_alone(events: Sequence[Any]) -> float:
    """Microseconds in which messages between stages, and nothing else, run on a GPU: a receive runs until its message
    is there."""
    others = [event.time_range for event in events if _MESSAGE not in event.name.lower()]
    return _union([event.time_range for event in events]) - _union(others)


def watched(step: Step, device: torch.device, trace: Path | None = None) -> list[Any]:
    """What the profiler sees of `PROFILED` steps: kernels and copies on a GPU, operations on the CPU."""
    cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CUDA] if cuda else []
    kinds += [ProfilerActivity.CPU] if trace is not None or not cuda else []
    with profile(activities=kinds) as seen:
        for _ in range(PROFILED):
            step()
        synchronise(device)
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [event for event in seen.events() if event.device_type == kind and not (cuda and event.is_user_annotation)]
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        seen.export_chrome_trace(str(trace))
    return events


def timed(step: Step, device: torch.device, repeats: int) -> float:
    """Seconds of a step, the mean of `repeats` without a wait between them."""
    synchronise(device)
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronise(device)
    return (time.perf_counter() - began) / repeats


def _by_name(events: Sequence[Any], cuda: bool) -> dict[str, float]:
    """Microseconds of a step by kernel: on the CPU those of an operation without what it calls, where it is told apart
    whether the optimizer calls it."""
    found: dict[str, float] = defaultdict(float)
    for event in events:
        stepping = not cuda and any(outer.name.startswith("Optimizer.step") for outer in _above(event))
        name = f"optimizer: {event.name}" if stepping else event.name
        found[name] += (event.time_range.elapsed_us() if cuda else event.self_cpu_time_total) / PROFILED
    return dict(found)


def _union(ranges: Sequence[Any]) -> float:
    """The microseconds that at least one of the ranges covers."""
    total, end = 0.0, float("-inf")
    for one in sorted(ranges, key=lambda one: one.start):
        total += max(0.0, one.end - max(one.start, end))
        end = max(end, one.end)
    return total


def predictions(compiled: CompiledProgram) -> tuple[float, float]:
    """The predicted microseconds of a step without communication over dp, and the share in which ranks wait."""
    line = predicted(compiled)
    return line.end, line.bubble


def measured_machine(profile_before: MachineProfile, device: torch.device, dtype: torch.dtype) -> MachineProfile:
    """The profile with this device's own rate of matrix products in `dtype`, and its copy bandwidth."""
    size = 8192 if device.type == "cuda" else 512
    x = torch.randn(size, size, device=device).to(dtype)
    large = torch.empty(2**28 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    other = torch.empty_like(large)
    product = _best(lambda: x @ x, device)
    copied = _best(lambda: other.copy_(large), device)
    flops = {**profile_before.flops, str(dtype).removeprefix("torch."): 2 * size**3 / product}
    return replace(profile_before, flops=flops, copy=2 * large.numel() / copied, source="measured here")


def agreed_machine(profile_before: MachineProfile, device: torch.device, dtype: torch.dtype) -> MachineProfile:
    """What the first rank measures, on all of them: plans that differ would be refused. Collective."""
    ranks = join(1, 1, device=device, timeout=TIMEOUT)
    try:
        found: MachineProfile = ranks.gather(measured_machine(profile_before, device, dtype))[0]
        return found
    finally:
        ranks.close()


def _best(work: Step, device: torch.device, bursts: int = 4) -> float:
    """The best mean of a few bursts, after a first call."""
    timed(work, device, 1)
    return min(timed(work, device, 5) for _ in range(bursts))
