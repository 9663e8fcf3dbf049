"""One compilation: what the user asked for, and the flow from a module to a program.

trace, the gate on the trace, rewrites, analyses, decisions, lowering, dry run, and the gate on the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from snnpart import compat, facts, hooks, simulate
from snnpart import gate as gates
from snnpart.blank import NOT_COMPARED, is_blank, settle_lazy
from snnpart.costs import MachineProfile, default_profile
from snnpart.errors import ConfigError, PlanError
from snnpart.facts import Value
from snnpart.frameworks import adapter_for
from snnpart.graph import SpikeGraph
from snnpart.layout import Layouts, input_dims, tensor_leaves
from snnpart.mesh import Mesh
from snnpart.pass_manager import Pass, PassManager
from snnpart.passes import ANALYZE, REWRITE
from snnpart.passes.analyze.cost import AnalyzeCost
from snnpart.passes.analyze.kernels import MeasuredTimes
from snnpart.passes.decide import decide
from snnpart.passes.decide.constraints import to_share
from snnpart.passes.decide.microbatches import Chosen, decide_microbatches
from snnpart.passes.decide.rounds import decide_rounds, runs_in_rounds
from snnpart.passes.lower import lower
from snnpart.passes.lower.kernels import copies_for
from snnpart.passes.rewrite.fold_time import FoldTime
from snnpart.passes.rewrite.fuse_neurons import is_fused
from snnpart.passes.rewrite.hoist_invariant import HoistInvariant
from snnpart.passes.rewrite.unfold_feedback import UnfoldFeedback
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from snnpart.trace import trace

Verify = Literal["off", "trace", "full"]
Shard = Literal["max", "time"] | Mapping[str, str]
SHARD_OBJECTIVES = ("max", "time")
VERIFY_LEVELS = ("off", "trace", "full")
STATES = ("reset", "carry")
CHANNELS_LAST = (True, False, "auto")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked `parallelize` for."""

    tp: int = 1
    pp: int = 1
    dp: str = "ddp"
    input_layout: Layouts | None = None
    in_dims: Any = None
    out_dims: Any = None
    time_steps: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    split_at: tuple[str, ...] | None = None
    batchnorm: str = "microbatch"
    shard: Shard = "max"
    verify: Verify = "full"
    hoist: bool = True
    fold: bool | int = True
    fuse: bool | str | None = None
    neuron_dtype: str = "float32"
    numerics: str = "exact"
    saved: str = "plain"
    channels_last: bool | str | None = None
    detach_every: int | None = None
    state: str = "reset"
    memory: int | None = None
    fsdp_units: int | None = None
    fsdp_reshard: bool | Literal["auto"] = "auto"
    reset: Callable[[nn.Module], None] | None = None
    profile: MachineProfile | None = None

    def __post_init__(self) -> None:
        Mesh(1, self.pp, self.tp)
        if self.verify not in VERIFY_LEVELS:
            raise ConfigError(f"verify={self.verify!r} is not known", choices=VERIFY_LEVELS)
        if isinstance(self.shard, str) and self.shard not in SHARD_OBJECTIVES:
            raise ConfigError(
                f"shard={self.shard!r} is not known", fix="or give a dict of paths and rules", choices=SHARD_OBJECTIVES
            )
        if self.state not in STATES:
            raise ConfigError(f"state={self.state!r} is not known", choices=STATES)
        if not (self.channels_last is None or isinstance(self.channels_last, bool) or self.channels_last == "auto"):
            raise ConfigError(f"channels_last={self.channels_last!r} is not known", choices=CHANNELS_LAST)
        if self.fsdp_reshard not in (True, False, "auto"):
            raise ConfigError(f"fsdp_reshard={self.fsdp_reshard!r} is not known", choices=(True, False, "auto"))
        for name in ("time_steps", "microbatches", "detach_every", "memory", "fsdp_units"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is not a positive integer")
        Plan(
            tp=self.tp, pp=self.pp, dp=self.dp, schedule=self.schedule or "", stages_per_rank=self.stages_per_rank or 0,
            numerics=self.numerics, neuron_dtype=self.neuron_dtype, fuse=self.fuse or False, saved=self.saved,
        )  # fmt: skip


def compile_program(
    model: nn.Module,
    inputs: Any,
    options: Options,
    plan: Plan | None = None,
    *,
    training: bool | None = None,
    cut: bool = True,
    kept: int = 0,
) -> tuple[CompiledProgram, gates.GateReport | None]:
    """Trace, analyse, decide and lower `model` for `inputs`; compare with the model as `options.verify` says.

    `cut=False`: the inputs are one microbatch, which is not cut again, so that it may be the only size that works.
    `kept`: see `SpikeGraph`.
    """
    check_finite(inputs)
    settle_lazy(model, _one_step(inputs, options), options.reset)
    blank = is_blank(model)
    if blank:
        options = replace(options, verify="off")
    profile = options.profile or default_profile()
    graph = trace_network(model, inputs, options, model.training if training is None else training, plan)
    graph.kept = kept
    report = None if options.verify == "off" else gates.check_trace(model, graph, inputs, reset=options.reset)
    kernels = _kernels(graph, options, plan)
    fused = cache(partial(is_fused, leaves=graph.leaves)) if kernels["fuse"] else None
    records = PassManager((*_rewrites(options, plan), *analyses(profile, fused))).run(graph)
    chosen = decide_microbatches(
        graph, asked=options.microbatches, schedule=options.schedule, pp=options.pp, batchnorm=options.batchnorm
    )
    decided = _decided(graph, options, chosen, plan, profile)
    folded = _fold(graph, options, decided, plan, profile)
    samples = graph.batch if plan is None else plan.samples
    decided = replace(decided, **kernels, **_numbers(options, plan), fold=folded, samples=samples)
    last, why = _layout(graph, decided, options, plan, profile)
    decided = replace(decided, channels_last=last)
    if cut:
        _check_cut(graph, decided)
    compiled = lower(graph, decided, profile=profile)
    notices = (
        *chosen.notices,
        *why,
        *_averaged_outputs(graph, decided.microbatches),
        *((NOT_COMPARED,) if blank else ()),
    )
    compiled = replace(compiled, passes=(*records, *compiled.passes), notices=(*notices, *compiled.notices))
    _check_hooks(compiled)
    simulate.dry_run(compiled)
    if options.verify == "full":
        report = gates.check_program(model, compiled, inputs, report, reset=options.reset)
    return compiled, None if report is None else replace(report, reference=None)


def _decided(graph: SpikeGraph, options: Options, chosen: Chosen, plan: Plan | None, profile: MachineProfile) -> Plan:
    return decide(
        graph,
        tp=options.tp,
        pp=options.pp,
        dp=options.dp,
        schedule=chosen.schedule,
        microbatches=chosen.microbatches,
        stages_per_rank=options.stages_per_rank or 0,
        split_at=options.split_at,
        memory=options.memory or 0,
        units=options.fsdp_units,
        reshard=None if options.fsdp_reshard == "auto" else options.fsdp_reshard,
        pinned=plan,
        profile=profile,
        **sharding(options.shard),
    )


def _one_step(inputs: Any, options: Options) -> Any:
    """What one call of the model is given: step 0 of inputs with a time dim where it computes one step a call."""
    if options.time_steps is None:
        return inputs
    times = iter(input_dims(inputs, layout=options.input_layout, in_dims=options.in_dims).time)
    first = lambda x, dim: x if dim is None else x.select(dim, 0)  # noqa: E731
    return pytree.tree_map(lambda x: first(x, next(times)) if isinstance(x, Tensor) else x, inputs)


def _rewrites(options: Options, plan: Plan | None) -> list[Pass]:
    """The rewrites that the options leave in. Loops that are to run in rounds stay loops over tp ranks too."""
    left_out = {
        name
        for name, wanted in ((FoldTime.name, options.fold is not False), (HoistInvariant.name, options.hoist))
        if not wanted
    }
    rewrites: list[Pass] = [item for item in REWRITE if item.name not in left_out]
    if options.tp > 1 and isinstance(options.fold, bool):
        rewrites.append(UnfoldFeedback(to_share(options.shard, None if plan is None else plan.shards)))
    return rewrites


def analyses(profile: MachineProfile, fused: Callable[[fx.Node], bool] | None) -> tuple[Pass, ...]:
    """The analyses, with times for this machine; `fused` says which neurons run in fused kernels."""
    usual = tuple(AnalyzeCost(profile, fused) if isinstance(item, AnalyzeCost) else item for item in ANALYZE)
    return (*usual, MeasuredTimes(profile, fused)) if profile.kernels or profile.scales else usual


def _kernels(graph: SpikeGraph, options: Options, plan: Plan | None) -> dict[str, Any]:
    """What the plan says of fused neurons: as asked, else as the given plan has it, else that they are for a network on
    a GPU. Neurons whose state outlives a call stay layers, which hold it. Only fused ones round
    states: fuse=False beside a plan leaves out its rounding too."""
    stateless = options.state == "reset" and options.detach_every is None
    usual: bool | str = _on_gpu(graph) if plan is None else plan.fuse
    fuse = stateless and ((usual or _rounds(options)) if options.fuse is None else options.fuse)
    how: Options | Plan = options if plan is None or _rounds(options) or options.fuse is False else plan
    if _rounds(how) and not fuse:
        raise ConfigError(
            f"neuron_dtype={how.neuron_dtype!r} rounds the states of fused neurons, and none is fused",
            fix='leave neuron_dtype out, or have neurons fused: fuse=True, state="reset" and no detach_every',
        )
    return {"fuse": fuse, "neuron_dtype": how.neuron_dtype}


def _on_gpu(graph: SpikeGraph) -> bool:
    return any(info.tensor.is_cuda for info in graph.tensors.values())


def _layout(
    graph: SpikeGraph, decided: Plan, options: Options, plan: Plan | None, profile: MachineProfile
) -> tuple[bool, tuple[str, ...]]:
    """Whether images lie with their channels last: as asked, else as the given plan has it, else, on a GPU, what takes
    less time; and a notice where convolutions keep the usual order for that."""
    if isinstance(options.channels_last, bool):
        return options.channels_last, ()
    if plan is not None or not (options.channels_last or _on_gpu(graph)):
        return plan is not None and plan.channels_last, ()
    found = copies_for(graph, decided, profile)
    why = f"copies take {found.last:.0f} us with channels last, and {found.usual:.0f} us inside convolutions without"
    kept = (f"images lie in the usual order: {why}",) if 0 < found.usual <= found.last else ()
    return found.last < found.usual, kept


def _rounds(how: Options | Plan) -> bool:
    """Whether states are to be rounded from step to step."""
    return how.neuron_dtype not in ("float32", "fp32")


def _numbers(options: Options, plan: Plan | None) -> dict[str, Any]:
    """What the plan says of statistics, evaluations and saved spikes: as the given plan has it where nothing else than
    the default is asked for."""
    default = Options()
    asked = {name: getattr(options, name) for name in ("batchnorm", "numerics", "saved")}
    kept = {name: getattr(plan, name) for name in asked} if plan is not None else {}
    return {name: kept.get(name, own) if own == getattr(default, name) else own for name, own in asked.items()}


def _fold(graph: SpikeGraph, options: Options, decided: Plan, plan: Plan | None, profile: MachineProfile) -> int:
    """How many steps of the folded loop run at a time (0: all): as asked, else as the given plan has it where that fits
    this number of steps, else what costs least. The graph's notes say why."""
    if plan is not None:
        wanted = plan.fold if plan.fold and options.fold is True else options.fold
        fits = isinstance(wanted, bool) or runs_in_rounds(graph, profile, decided)
        options = replace(options, fold=wanted if fits else True)
    together, why = decide_rounds(
        graph, replace(profile, cache=0.0) if _on_gpu(graph) else profile, options.fold, decided
    )
    if why:
        graph.notes[FoldTime.name] = "\n".join(filter(None, (graph.notes.get(FoldTime.name, ""), why)))
    return together


def _check_cut(graph: SpikeGraph, plan: Plan) -> None:
    """ConfigError when batches would be cut although the network holds for one size: it would mix up samples."""
    if plan.microbatches > 1 and graph.batch_fixed and not graph.batch_fixed.startswith("no input"):
        raise ConfigError(
            f"a batch cannot be cut into {plan.microbatches} microbatches: {graph.batch_fixed}",
            where=f"network '{graph.name}'",
            fix="compile with microbatches=1, or read the batch size from the input in forward",
        )


def _check_hooks(compiled: CompiledProgram) -> None:
    """Raise where a hook of the user's would not see what it was made for: copies of parameters carry gradient hooks,
    which are given the gradient of one backward, and no others."""
    for part in (part for program in compiled.stages.values() for part in program.tensors):
        tensor = compiled.source.tensors[part.name].tensor
        if compat.has_accumulation_hooks(tensor):
            raise ConfigError(
                f"'{part.name}' has a hook that runs after its gradient is accumulated, which happens on a copy",
                fix="register it on the running program's parameter: dict(running.named_parameters())",
            )
        if (part.dim is not None or part.partial_gradient) and hooks.needs_whole(tensor):
            owner = part.name.rpartition(".")[0]
            raise PlanError(
                f"'{part.name}' has a gradient hook, which expects the whole gradient; a tp rank has a part of it",
                fix=f'keep the layer whole: shard={{"{owner}": "replicate"}}',
            )


def _averaged_outputs(graph: SpikeGraph, microbatches: int) -> tuple[str, ...]:
    """A notice for every output without a batch dim of a program that cuts its batches."""
    if microbatches == 1:
        return ()
    return tuple(
        f"output '{info.name}' has no batch dim: over {microbatches} microbatches it is the mean of theirs weighted by "
        "samples (the first one's where it is no floating-point number), not the value at the whole batch"
        for info in graph.outputs
        if info.batch_dim is None and not graph.batch_fixed.startswith("no input")
    )


def steps_of(inputs: Any, options: Options) -> int | None:
    """T of a single-step module for these inputs: what their time dims say, where they have one."""
    if options.time_steps is None:
        return None
    dims = input_dims(inputs, layout=options.input_layout, in_dims=options.in_dims)
    sizes = {x.shape[d] for x, d in zip(tensor_leaves(inputs), dims.time, strict=True) if d is not None}
    return sizes.pop() if len(sizes) == 1 else options.time_steps


def sharding(shard: Shard) -> dict[str, Any]:
    """The arguments of `decide` that the request for sharding stands for."""
    return {"objective": shard} if isinstance(shard, str) else {"shard": shard}


def trace_network(
    model: nn.Module, inputs: Any, options: Options, training: bool, plan: Plan | None = None
) -> SpikeGraph:
    """The network as a graph, in which neuron layers whose matrices tp ranks are to share are traced through."""
    graph = trace_model(model, inputs, options, training)
    if options.tp == 1 or not isinstance(options.fold, bool):
        return graph
    shared = to_share(options.shard, None if plan is None else plan.shards)
    opened = [path for path, steps in _with_matrix(graph).items() if shared(path, steps)]
    return trace_model(model, inputs, options, training, opened) if opened else graph


def _with_matrix(graph: SpikeGraph) -> dict[str, int]:
    """The leaves that hold matrices, with the number of steps that they run."""
    steps: dict[str, int] = {}
    for node in graph.graph.nodes:
        module = graph.leaves[str(node.target)].module if node.op == "call_module" else None
        if module is not None and adapter_for(module).holds_matrix(module):
            dim = adapter_for(module).time_dim(module)
            taken = 1 if dim is None else facts.need(node.args[0], Value).shape[dim]
            steps[str(node.target)] = steps.get(str(node.target), 0) + taken
    return steps


def trace_model(
    model: nn.Module, inputs: Any, options: Options, training: bool, opened: Collection[str] = ()
) -> SpikeGraph:
    """The network as a graph, with batch and time where the options say."""
    dims = input_dims(inputs, layout=options.input_layout, in_dims=options.in_dims)
    return trace(
        model,
        inputs,
        in_dims=dims.batch,
        time_dims=dims.time,
        out_dims=options.out_dims,
        time_steps=options.time_steps,
        training=training,
        reset=options.reset,
        opened=opened,
    )


def check_finite(inputs: Any) -> None:
    """ConfigError when an example input holds NaN or Inf: a gate fed with those shows nothing."""
    for position, x in enumerate(tensor_leaves(inputs)):
        if x.is_floating_point() and x.device.type != "meta" and not torch.isfinite(x).all():
            raise ConfigError(
                f"tensor {position} of the example inputs, shape {tuple(x.shape)}, holds NaN or Inf",
                fix="give finite example inputs",
            )
