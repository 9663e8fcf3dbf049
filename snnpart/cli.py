"""The command line.

Exit codes: 0 done, 1 a `SnnpartError` (its message on stderr), 2 the command was not understood.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from snnpart.config import make_input, make_model
from snnpart.errors import ConfigError, SnnpartError
from snnpart.frameworks.factories import set_step_mode

if TYPE_CHECKING:
    from snnpart.api import ParallelProgram

BATCH_FIRST = "batch first"
_FLAGS_ARE_THE_CONFIGURATION = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="snnpart",
    help="Compile a spiking neural network into one program per rank.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Argument(metavar="MODULE:FACTORY", help="function, class or module object that is the model")
]
Inputs = Annotated[
    list[str], typer.Option("--input", help="dtype[shape] of an input, e.g. float32[4,32,3,128,128]; again for more")
]
Arguments = Annotated[
    list[str] | None, typer.Option("--arg", help="NAME=VALUE for the factory; @module:object is imported")
]
Layout = Annotated[
    str | None, typer.Option(help="where batch (N) and time (T) are: NCHW, TNCHW, NTCHW; tried out if not given")
]
InDims = Annotated[int | None, typer.Option("--in-dims", help="batch dim of the inputs, instead of a layout")]
Steps = Annotated[int | None, typer.Option("--time-steps", help="T: call a single-step model T times")]
Tp = Annotated[int, typer.Option(help="ranks that share the channels of each layer")]
Pp = Annotated[int, typer.Option(help="pipeline stages")]
Microbatches = Annotated[int | None, typer.Option(help="parts of a batch in the pipeline; default pp")]
Schedule = Annotated[str | None, typer.Option(help="1f1b (default), gpipe, interleaved-1f1b, interleaved-zb or zbv")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="JSON of a plan to keep")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="file to write instead of the terminal")]
Verify = Annotated[str, typer.Option(help="compare with the model: off, trace or full")]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    try:
        app(arguments)
    except SnnpartError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"error: {error}"))
        sys.exit(1)


@app.command()
def report(
    model: Model,
    input: Inputs,
    arg: Arguments = None,
    layout: Layout = None,
    in_dims: InDims = None,
    time_steps: Steps = None,
    tp: Tp = 1,
    pp: Pp = 1,
    microbatches: Microbatches = None,
    schedule: Schedule = None,
    plan: PlanFile = None,
    verify: Verify = "off",
    output: Output = None,
) -> None:
    """Show what each rank would do: stages, split layers, bytes. -o FILE.html, .json or .txt writes it."""
    options = _options(tp, pp, microbatches, schedule, plan, time_steps, verify)
    program = _compile(model, input, arg, layout, in_dims, options)
    made = program.report()
    if output is None:
        from snnpart.report.text import renderable

        Console(highlight=False).print(renderable(made))
    else:
        _say(f"wrote {made.write(output)}")


@app.command()
def plan(
    model: Model,
    input: Inputs,
    arg: Arguments = None,
    layout: Layout = None,
    in_dims: InDims = None,
    time_steps: Steps = None,
    tp: Tp = 1,
    pp: Pp = 1,
    microbatches: Microbatches = None,
    schedule: Schedule = None,
    plan: PlanFile = None,
    output: Output = None,
) -> None:
    """Print the plan as JSON, to edit and give back with --plan or plan=."""
    options = _options(tp, pp, microbatches, schedule, plan, time_steps, "off")
    program = _compile(model, input, arg, layout, in_dims, options)
    _emit(program.plan.to_json(), output)


@app.command()
def verify(
    model: Model,
    input: Inputs,
    arg: Arguments = None,
    layout: Layout = None,
    in_dims: InDims = None,
    time_steps: Steps = None,
    tp: Tp = 1,
    pp: Pp = 1,
    microbatches: Microbatches = None,
    schedule: Schedule = None,
    plan: PlanFile = None,
) -> None:
    """Compare the traced and the lowered program with the model; exit code 1 if output, gradients or buffers differ."""
    from snnpart.report.sections import gate_value

    options = _options(tp, pp, microbatches, schedule, plan, time_steps, "full")
    program = _compile(model, input, arg, layout, in_dims, options)
    for key, value in (program.report().gate or {}).items():
        _say(f"{key}: {gate_value(value)}")
    _say("the program computes what the model computes")


@app.command()
def trace(
    model: Model,
    input: Inputs,
    arg: Arguments = None,
    layout: Layout = None,
    in_dims: InDims = None,
    time_steps: Steps = None,
    output: Output = None,
) -> None:
    """Print the traced graph as text (docs/ir.md), which tools/snnpart-opt reads."""
    from snnpart.text import print_graph

    options = _options(1, 1, None, None, None, time_steps, "off")
    _emit(print_graph(_traced(model, input, arg, layout, in_dims, options), with_leaves=True), output)


@app.command()
def doctor() -> None:
    """Show versions, devices and links, and what is missing with the command that installs it."""
    from snnpart.doctor import examine, healthy

    findings = examine()
    table = Table("", "", "found", "to mend it", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(finding.group, finding.name, Text(finding.found), Text(finding.mend))
    Console(highlight=False).print(table)
    if not healthy(findings):
        raise typer.Exit(1)


@app.command(add_help_option=False, context_settings=_FLAGS_ARE_THE_CONFIGURATION)
def run(context: typer.Context) -> None:
    """Train, evaluate or predict a saved program on the ranks that torchrun started (run --help lists its options)."""
    from snnpart.run import main as run_saved

    code = run_saved(context.args)
    if code:
        raise typer.Exit(code)


def _vision(name: str, text: str) -> None:
    """Add a command whose flags are the fields of a configuration (`vision.commands`)."""

    def command(context: typer.Context) -> None:
        from snnpart.vision.commands import main as run_command

        code = run_command(name, context.args)
        if code:
            raise typer.Exit(code)

    app.command(name, help=text, add_help_option=False, context_settings=_FLAGS_ARE_THE_CONFIGURATION)(command)


_vision("init", "Write a commented example configuration for train, evaluate or predict.")
_vision("train", "Train a network on the ranks that torchrun started (train --help lists the fields).")
_vision("evaluate", "Loss and accuracy of an artifact or a checkpoint, every sample counted once.")
_vision("predict", "The logits of every sample, in an HDF5 file.")
_vision("export", "Write the artifact of a training run's checkpoint.")


def _options(
    tp: int,
    pp: int,
    microbatches: int | None,
    schedule: str | None,
    plan: Path | None,
    time_steps: int | None,
    verify: str,
) -> dict[str, Any]:
    """Keywords of `parallelize`."""
    return {
        "tp": tp,
        "pp": pp,
        "microbatches": microbatches,
        "schedule": schedule,
        "plan": plan,
        "time_steps": time_steps,
        "verify": verify,
    }


def _compile(
    path: str,
    texts: list[str],
    arguments: list[str] | None,
    layout: str | None,
    in_dims: int | None,
    options: dict[str, Any],
) -> ParallelProgram:
    """The program of the model, in the layout that was given or is the only one that works."""
    from snnpart.api import parallelize

    model, inputs = _understood(path, texts, arguments)
    model, dims = _find_layout(model, inputs, layout, in_dims, options)
    return parallelize(model, example_inputs=inputs, **dims, **options)


def _traced(
    path: str,
    texts: list[str],
    arguments: list[str] | None,
    layout: str | None,
    in_dims: int | None,
    options: dict[str, Any],
) -> Any:
    """The traced graph of the model."""
    model, inputs = _understood(path, texts, arguments)
    model, dims = _find_layout(model, inputs, layout, in_dims, options)
    return _trace(model, inputs, dims, options)


def _understood(path: str, texts: list[str], arguments: list[str] | None) -> tuple[nn.Module, tuple[Any, ...]]:
    """Model and example inputs from the words of the command line; what is not understood is a usage error."""
    try:
        inputs = tuple(make_input(text, seed) for seed, text in enumerate(texts))
        floats = {x.dtype for x in inputs if x.is_floating_point()}
        return make_model(path, arguments or (), dtype=floats.pop() if len(floats) == 1 else None), inputs
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def _trace(model: nn.Module, inputs: tuple[Any, ...], dims: dict[str, Any], options: dict[str, Any]) -> Any:
    from snnpart.compilation import Options, trace_model

    chosen = Options(time_steps=options["time_steps"], **dims)
    return trace_model(model, inputs, chosen, model.training)


def _find_layout(
    model: nn.Module, inputs: tuple[Any, ...], layout: str | None, in_dims: int | None, options: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """The model in the step mode that goes with the layout, and `input_layout` or `in_dims` for `parallelize`."""
    if layout is not None:
        set_step_mode(model, "T" in layout and options["time_steps"] is None)
        return model, {"input_layout": layout}
    if in_dims is not None:
        return model, {"in_dims": in_dims}
    return _only_layout_that_works(model, inputs, options)


def _only_layout_that_works(
    model: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """Try the model as it is with the batch first, and in multi-step mode with time first; refuse to choose."""
    tries: dict[str, tuple[nn.Module, dict[str, Any]]] = {BATCH_FIRST: (model, {})}
    if options["time_steps"] is None and all(x.dim() > 2 for x in inputs):
        layouts = tuple("TNCHWD"[: x.dim()] for x in inputs)
        stepped = copy.deepcopy(model)
        set_step_mode(stepped, True)
        tries[",".join(layouts)] = (stepped, {"input_layout": layouts})
    failures = {name: _failure(*attempt, inputs, options) for name, attempt in tries.items()}
    working = [name for name in tries if not failures[name]]
    if len(working) > 1:
        raise ConfigError("the inputs can be read in several layouts", fix="say --layout", choices=working)
    if not working:
        raise _none_works(failures)
    _say(f"layout: {working[0]} (the only one that works)", error=True)
    return tries[working[0]]


def _failure(
    model: nn.Module, dims: dict[str, Any], inputs: tuple[Any, ...], options: dict[str, Any]
) -> SnnpartError | str:
    """Why the model cannot be traced in this layout, or "" when it can, for any batch size."""
    try:
        fixed: str = _trace(model, inputs, dims, options).batch_fixed
        return fixed
    except SnnpartError as error:
        return error


def _none_works(failures: dict[str, SnnpartError | str]) -> SnnpartError:
    """The model's own error when only one way was tried, otherwise all of them."""
    reasons = list(failures.values())
    if len(reasons) == 1 and isinstance(reasons[0], SnnpartError):
        return reasons[0]
    listed = "".join(f"\n  {name}: {reason}" for name, reason in failures.items())
    return ConfigError(f"no layout works for every batch size{listed}", fix="say --layout or --in-dims")


def _emit(text: str, output: Path | None) -> None:
    """To the file, or to the terminal as it is."""
    if output is None:
        typer.echo(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8")
        _say(f"wrote {output}")


def _say(line: str, *, error: bool = False) -> None:
    typer.echo(line, err=error)
