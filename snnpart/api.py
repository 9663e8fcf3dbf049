"""The door: `parallelize` turns an ordinary module into a program for many ranks.

The flow is design.md's: trace, canonicalize, analyse, decide, lower, dry run, gate. Without example inputs nothing
happens until the first batch, as with `torch.compile`; from then on the two forms are the same.

One `ParallelProgram` may be compiled for several signatures (another number of steps, another image size, train and
eval mode of a network that branches on it): the plan of the first is kept, so that every tensor stays where it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from snnpart import gate as gates
from snnpart.blank import is_blank
from snnpart.carrier import StateCarrier
from snnpart.compilation import Options, Shard, Verify, compile_program, steps_of
from snnpart.costs import MachineProfile, default_profile
from snnpart.errors import ConfigError, LaunchError, PlanError
from snnpart.explain import Why
from snnpart.graph import SpikeGraph
from snnpart.layout import Layouts, input_dims
from snnpart.lazy import LazyProgram
from snnpart.passes.decide.constraints import pins_for
from snnpart.passes.decide.why import why
from snnpart.plan import Plan
from snnpart.program import CompiledProgram
from snnpart.windows import Cut, check_windows

if TYPE_CHECKING:
    from snnpart.report import Report
    from snnpart.runtime.launch import RunningProgram


def parallelize(
    model: nn.Module,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: str = "ddp",
    example_inputs: Any = None,
    input_layout: Layouts | None = None,
    in_dims: Any = None,
    out_dims: Any = None,
    time_steps: int | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    stages_per_rank: int | None = None,
    split_at: Sequence[str] | None = None,
    batchnorm: str = "microbatch",
    plan: Plan | str | os.PathLike[str] | None = None,
    shard: Shard = "max",
    verify: Verify = "full",
    hoist: bool = True,
    fuse: bool | str | None = None,
    neuron_dtype: str = "float32",
    numerics: str = "exact",
    saved: str = "plain",
    channels_last: bool | Literal["auto"] | None = None,
    fold: bool | int = True,
    detach_every: int | None = None,
    state: str = "reset",
    memory: int | None = None,
    fsdp_units: int | None = None,
    fsdp_reshard: bool | Literal["auto"] = "auto",
    reset: Callable[[nn.Module], None] | None = None,
    profile: MachineProfile | None = None,
) -> ParallelProgram:
    """Compile `model` into one program per rank; the model itself is only read.

    Args:
        model: any module that computes with spiking neurons; it is not changed.
        tp: ranks that share the channels of each layer.
        pp: pipeline stages. Data parallelism takes what remains: dp = world / (tp * pp), known at launch.
        dp: "ddp" or "fsdp2": how data-parallel ranks hold the parameters.
        example_inputs: a tensor, a tuple (positional arguments) or a dict (keywords) with one dp rank's batch. None
            compiles at the first batch.
        input_layout: where batch and time are, "NCHW", "TNCHW", "NTCHW", one for all tensor inputs or one each.
        in_dims: instead of a layout: the batch dim, for all or one each (None: no batch). Default 0.
        out_dims: batch dim of each output; found by tracing with two batch sizes when None.
        time_steps: T: `model` computes one step, the program calls it T times with the state reset around the window,
            takes step t of inputs that have a time dim, and stacks the outputs over T at dim 0.
        microbatches: parts of a batch that are in the pipeline at once; default pp.
        schedule: "1f1b", "gpipe", "interleaved-1f1b", "interleaved-zb" or "zbv"; see docs/pipeline.md. None: "1f1b", or
            "gpipe" where `microbatches` are fewer than pp.
        stages_per_rank: stages of each rank under an interleaved schedule; default 2.
        batchnorm: whose statistics BatchNorm takes in training: "microbatch", as gradient accumulation does, "full",
            the whole batch's (GPipe), or "sync", a microbatch's over all data-parallel ranks.
        split_at: the paths of the modules that begin the stages 1, 2, ..., instead of the cut that is found.
        plan: decisions to keep, as a `Plan` or the path of its JSON. Its topology and schedule count; modules that it
            does not name are decided.
        shard: how channels are shared over tp: "max" (every layer that can be sharded is, in the fastest way; for
            memory), "time" (the fastest plan, which may leave layers whole), or a dict of module paths or patterns to
            rules, `{"layer4.*": "column", "fc": "replicate"}`; what it does not name is decided as with "max".
        verify: "off", "trace" (compare the traced graph with the model), or "full" (the lowered program too).
        detach_every: k: a training step runs a sequence of T steps as windows of k, forward and backward of each; state
            goes from window to window without its graph, the loss is taken of each window.
        state: "reset": every step starts from reset state; "carry": from what the step before left, without its graph
            (`RunningProgram.reset` and `reset_mask=` of the steps start sequences anew).
        fold: run what a time loop does at every step in one call over all steps, where no step needs another; over k
            steps at a time where that is cheaper on this machine, or where a number k is given (docs/time.md).
        hoist: compute what is repeated over time (a static image through the stem) once.
        fuse, channels_last: one kernel for norm, neuron and addition; images with channels last (docs/kernels.md).
            None: on a GPU, where the model is on one. fuse="auto": in the way that is fastest there;
            channels_last="auto", which None is there: if that takes fewer copies.
        neuron_dtype: what fused neurons round states to from step to step: "fp32" (not), "bf16", "fp16"; see
            docs/kernels.md.
        numerics: "fold": evaluations fold BatchNorm into the convolution or linear layer before it (docs/kernels.md);
            "exact": not.
        saved: "packed": spikes that convolutions and linear layers keep for backward are kept as bits; "plain": not.
        memory: bytes that one rank may take in a training step: parameters, gradients, two moments of an optimizer, and
            what backward needs of the microbatches in flight. Layers are shared and stages are cut so that it is kept.
        fsdp_units: with dp="fsdp2", units of each stage in which parameters are gathered and gradients reduced (at most
            one for each block or module); None: the fastest number.
        fsdp_reshard: whether parameters are sharded again after forward and gathered once more for backward: less
            memory, more messages. "auto": where the gathers are hidden behind computation.
        reset: resets the model's state, where snnpart cannot find out how.
        profile: the machine to predict times for; default `costs.default_profile()`.

    Returns:
        a `ParallelProgram`: `report()`, `save()`, `launch()`.

    Raises:
        ConfigError: a bad argument. TraceError: the model cannot be held in a graph. PlanError: no plan satisfies the
        request. VerifyError: the program does not compute what the model computes.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}, not a torch.nn.Module",
            fix="pass the module itself (call a factory first, not the factory)",
        )
    if isinstance(split_at, str) or (split_at is not None and plan is not None):
        raise ConfigError(
            f"split_at={split_at!r} "
            + ("is one text" if isinstance(split_at, str) else "and a plan, which has stages"),
            fix='give a list of module paths, ["layer2", "layer3.1"], or edit plan.stages',
        )
    fixed = read_plan(plan)
    if fixed is not None:
        given: dict[str, Any] = {"stages_per_rank": stages_per_rank, "memory": memory}
        given |= {"schedule": schedule, "microbatches": microbatches}
        _check_agrees(fixed, tp=tp, pp=pp, dp=dp, **given)
        tp, pp, dp, schedule = fixed.tp, fixed.pp, fixed.dp, fixed.schedule
        microbatches, stages_per_rank = fixed.microbatches, fixed.stages_per_rank
        memory = fixed.memory or None
    options = Options(
        tp=tp,
        pp=pp,
        dp=dp,
        input_layout=input_layout,
        in_dims=in_dims,
        out_dims=out_dims,
        time_steps=time_steps,
        microbatches=microbatches,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        split_at=None if split_at is None else tuple(split_at),
        batchnorm=batchnorm,
        shard=shard,
        verify=verify,
        hoist=hoist,
        fuse=fuse,
        neuron_dtype=neuron_dtype,
        numerics=numerics,
        saved=saved,
        channels_last=channels_last,
        fold=fold,
        detach_every=detach_every,
        state=state,
        memory=memory,
        fsdp_units=fsdp_units,
        fsdp_reshard=fsdp_reshard,
        reset=reset,
        profile=profile,
    )
    program = ParallelProgram(model, options, fixed)
    if example_inputs is not None:
        program.compile(example_inputs)
    return program


def _check_agrees(plan: Plan, **given: Any) -> None:
    """ConfigError when an argument that is not left at its default asks for something else than the plan."""
    defaults = {"tp": 1, "pp": 1, "dp": "ddp", "schedule": None}
    for name, value in given.items():
        if value not in (defaults.get(name), getattr(plan, name)):
            raise ConfigError(
                f"{name}={value!r}, but the plan says {getattr(plan, name)!r}",
                fix=f"leave {name} out, or edit the plan",
            )


def _check_paths(plan: Plan, model: nn.Module, graph: SpikeGraph) -> None:
    """PlanError when a pinned stage belongs to nothing: a misspelt path would have no effect."""
    tensors = [name for info in graph.tensors.values() for name in (info.name, *info.aliases)]
    known = [*(path for path, _ in model.named_modules(remove_duplicate=False)), *tensors]
    paths = {path: path.partition("@")[0] for path in plan.stages}  # conv.weight@1 is a copy of conv.weight
    odd = [at for at, path in paths.items() if not any(name == path or name.startswith(f"{path}.") for name in known)]
    if odd:
        raise PlanError(
            f"plan.stages names {odd[:5]}, which the network does not have", fix="use the path of a module or tensor"
        )


def read_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """The plan itself, or read from a JSON file."""
    if plan is None or isinstance(plan, Plan):
        return plan
    try:
        with open(plan, encoding="utf-8") as file:
            return Plan.from_json(file.read())
    except OSError as error:
        raise ConfigError(f"the plan file cannot be read: {error}", fix="give the path of a plan's JSON") from error


class ParallelProgram:
    """A network compiled for many ranks, or about to be at its first batch."""

    def __init__(self, model: nn.Module, options: Options, plan: Plan | None = None) -> None:
        self.model, self.options = model, options
        self._plan = plan
        self._compiled: CompiledProgram | None = None
        self._gate: gates.GateReport | None = None
        self._example: Any = None
        self._cut: Cut | None = None

    def compile(self, inputs: Any) -> CompiledProgram:
        """Compile for `inputs` (as `example_inputs`); the first compilation fixes the plan."""
        inputs = self._first_window(inputs)
        compiled, report = compile_program(self.model, inputs, self.options, self._plan)
        if self._compiled is None:
            if self._plan is not None:
                _check_paths(self._plan, self.model, compiled.source)
            self._compiled, self._gate, self._plan, self._example = compiled, report, compiled.plan, inputs
        return compiled

    def _first_window(self, inputs: Any) -> Any:
        """With `detach_every`: what one window is given. From then on `time_steps` is that of a window."""
        options = self.options
        if options.detach_every is None or self._cut is not None:
            return inputs
        times = input_dims(inputs, layout=options.input_layout, in_dims=options.in_dims).time
        cut = Cut(options.detach_every, times, options.time_steps)
        first, _ = next(cut.windows(inputs))
        if options.verify != "off":
            check_windows(self.model, inputs, cut, options.reset)
        if options.time_steps is not None:
            self.options = replace(options, time_steps=min(options.detach_every, options.time_steps))
        self._cut = cut
        return first

    @property
    def compiled(self) -> CompiledProgram:
        """The lowered program; LaunchError before the first batch in lazy mode."""
        if self._compiled is None:
            raise LaunchError(
                "the program is compiled at its first batch, which has not come yet",
                fix="give example_inputs= to parallelize, or run a step first",
            )
        return self._compiled

    @property
    def plan(self) -> Plan:
        return self.compiled.plan

    def report(self) -> Report:
        """What was decided, and what it costs."""
        from snnpart.report import build

        return build(self.compiled, self._gate, self._why)

    def _why(self, path: str) -> Why:
        shard = self.options.shard
        asked = {} if isinstance(shard, str) else pins_for(self.compiled.source, self.plan.tp, shard)
        return why(
            self.compiled.source,
            self.plan,
            path,
            profile=self.options.profile or default_profile(),
            constraints=asked,
            objective=shard if isinstance(shard, str) else "max",
        )

    def save(self, directory: str | os.PathLike[str], values: Mapping[str, Tensor] | None = None) -> None:
        """Write the program as a directory that runs without this model's source files (see `artifact`).

        `values` are full tensors to save instead of the model's, by its names: a running program's `state_dict()`.
        """
        from snnpart.artifact import save

        save(self.compiled, directory, values)

    def launch(self, optimizer: Callable[..., Any] | None = None, **options: Any) -> RunningProgram | LazyProgram:
        """Start the program on the ranks torchrun started; see `runtime.launch.launch` for the options.

        In lazy mode the ranks start at the first batch.
        """
        if self._compiled is None:
            from snnpart.runtime.launch import check_options

            check_options({"optimizer": optimizer, **options})
            return LazyProgram(self, {"optimizer": optimizer, **options})
        return self._launch({"optimizer": optimizer, **options})

    def measured_profile(self) -> MachineProfile:
        """The machine profile with the times of this network's own operations, measured here on the example batch.

        Compile again with `profile=` it to have stages cut by what they take. All ranks must be given the same one
        (`MachineProfile.to_json`): their plans would differ otherwise.
        """
        from snnpart.measure import with_kernels

        return with_kernels(self.options.profile or default_profile(), self.compiled.source, self._example)

    def _launch(self, options: Mapping[str, Any]) -> RunningProgram:
        from snnpart.runtime.launch import launch
        from snnpart.runtime.values import ResetParameters

        blank = is_blank(self.model)
        comparable = self.options.verify == "full" and not blank and options.get("values") is None
        expected = self._check_running if comparable else None
        own: dict[str, Any] = {"specialise": self._specialise, "expected": expected}
        own |= {"carry": self.options.state == "carry", "values": ResetParameters(self.model) if blank else None}
        return launch(self.compiled, **{**own, "cut": self._cut, "carrier": self._carrier(), **options})

    def _carrier(self) -> StateCarrier:
        """What compiles the network with hand-written state as inputs and outputs."""

        def compile_model(inputs: Any, in_dims: Any, out_dims: Any, training: bool, kept: int) -> CompiledProgram:
            verify: Verify = "off" if self.options.verify == "off" else "trace"
            places = {"input_layout": None, "in_dims": in_dims, "out_dims": out_dims, "time_steps": None}
            options = replace(self.options, verify=verify, **places)
            return compile_program(self.model, inputs, options, self.plan, training=training, cut=False, kept=kept)[0]

        return StateCarrier(self.model, self.compiled.source, compile_model, self.options)

    def _check_running(self, running: RunningProgram) -> None:
        gates.check_running(running, self._example)

    def _specialise(self, inputs: Any, training: bool) -> CompiledProgram:
        """The same network and plan for another signature; numerics were checked for the first one."""
        verify: Verify = "off" if self.options.verify == "off" else "trace"
        options = replace(self.options, verify=verify, time_steps=steps_of(inputs, self.options))
        compiled, _ = compile_program(self.model, inputs, options, self.plan, training=training, cut=False)
        return compiled


class SavedProgram:
    """A program read from a directory by `load`: what `ParallelProgram` is, without the model to compile again."""

    def __init__(self, compiled: CompiledProgram) -> None:
        self.compiled = compiled

    @property
    def plan(self) -> Plan:
        return self.compiled.plan

    def report(self) -> Report:
        """What was decided, and what it costs."""
        from snnpart.report import build

        return build(self.compiled)

    def launch(self, optimizer: Callable[..., Any] | None = None, **options: Any) -> RunningProgram:
        """Start the program on the ranks torchrun started; see `runtime.launch.launch` for the options."""
        from snnpart.runtime.launch import launch

        return launch(self.compiled, optimizer=optimizer, **options)


def load(directory: str | os.PathLike[str], *, modules: Collection[str] | None = None) -> SavedProgram:
    """The program that `ParallelProgram.save` wrote.

    Args:
        modules: packages whose neuron classes may be imported; default: those the program lists.

    Raises:
        CheckpointError: a file is missing, damaged or of another version, or a class cannot be imported.
    """
    from snnpart.artifact import load as read

    return SavedProgram(read(directory, modules=modules))
