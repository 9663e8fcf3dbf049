"""The command line.

Exit codes: 0 done, 1 a `SnnpartError` (its message on stderr), 2 the command was not understood.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from snnpart.cli_options import Compilation, Execution, Network, Output, Precision, Trace, Verify, takes
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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    try:
        app(arguments)
    except SnnpartError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"error: {error}"))
        sys.exit(1)


@app.command()
@takes(Compilation)
def report(asked: Compilation, verify: Verify = "off", output: Output = None) -> None:
    """Show what each rank would do: stages, split layers, bytes. -o FILE.html, .json or .txt writes it."""
    made = _compile(asked, verify).report()
    if output is None:
        from snnpart.report.text import renderable

        Console(highlight=False).print(renderable(made))
    else:
        _say(f"wrote {made.write(output)}")


@app.command()
@takes(Compilation)
def plan(asked: Compilation, output: Output = None) -> None:
    """Print the plan as JSON, to edit and give back with --plan or plan=."""
    _emit(_compile(asked, "off").plan.to_json(), output)


@app.command()
@takes(Compilation)
def verify(asked: Compilation) -> None:
    """Compare the traced and the lowered program with the model; exit code 1 if output, gradients or buffers differ."""
    from snnpart.report.sections import gate_value

    for key, value in (_compile(asked, "full").report().gate or {}).items():
        _say(f"{key}: {gate_value(value)}")
    _say("the program computes what the model computes")


@app.command()
@takes(Compilation)
def profile(
    asked: Compilation,
    execution: Execution = "auto",
    precision: Precision = "fp32",
    trace: Trace = None,
    output: Output = None,
) -> None:
    """Run train steps, under torchrun on its ranks, and show where their time goes, beside prediction and roofline."""
    from snnpart.profile import profile as profiled

    torch.manual_seed(0)  # the ranks start with the same weights
    model, inputs, dims = _understood(asked)
    text = profiled(model, inputs, {**dims, **asked.options()}, execution=execution, precision=precision, trace=trace)
    if text:
        _emit(text, output)


@app.command()
@takes(Network)
def trace(asked: Network, output: Output = None) -> None:
    """Print the traced graph as text (docs/ir.md), which tools/snnpart-opt reads."""
    from snnpart.text import print_graph

    model, inputs, dims = _understood(asked)
    graph = _trace(model, inputs, dims, asked.time_steps)
    _emit(print_graph(graph, with_leaves=True), output)


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


def _compile(asked: Compilation, verify: str) -> ParallelProgram:
    """The program of the model, in the layout that was given or is the only one that works."""
    from snnpart.api import parallelize

    model, inputs, dims = _understood(asked)
    options = {**asked.options(), "verify": verify}
    return parallelize(model, example_inputs=inputs, **dims, **options)


def _understood(asked: Network) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model in its step mode, example inputs, and `input_layout` or `in_dims`."""
    model, inputs = _made(asked)
    model, dims = _find_layout(model, inputs, asked)
    return model, inputs, dims


def _made(asked: Network) -> tuple[nn.Module, tuple[Any, ...]]:
    """Model and example inputs from the words of the command line; what is not understood is a usage error."""
    try:
        inputs = tuple(make_input(text, seed) for seed, text in enumerate(asked.input))
        floats = {x.dtype for x in inputs if x.is_floating_point()}
        return make_model(asked.model, asked.arg or (), dtype=floats.pop() if len(floats) == 1 else None), inputs
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def _trace(model: nn.Module, inputs: tuple[Any, ...], dims: dict[str, Any], time_steps: int | None) -> Any:
    from snnpart.compilation import Options, trace_model

    return trace_model(model, inputs, Options(time_steps=time_steps, **dims), model.training)


def _find_layout(model: nn.Module, inputs: tuple[Any, ...], asked: Network) -> tuple[nn.Module, dict[str, Any]]:
    """The model in the step mode that goes with the layout, and `input_layout` or `in_dims` for `parallelize`."""
    if asked.layout is not None:
        if "T" in asked.layout or asked.time_steps is not None:  # else the model makes its steps itself
            set_step_mode(model, asked.time_steps is None)
        return model, {"input_layout": asked.layout}
    if asked.in_dims is not None:
        return model, {"in_dims": asked.in_dims}
    return _only_layout_that_works(model, inputs, asked.time_steps)


def _only_layout_that_works(
    model: nn.Module, inputs: tuple[Any, ...], time_steps: int | None
) -> tuple[nn.Module, dict[str, Any]]:
    """Try the model as it is with the batch first, and in multi-step mode with time first; refuse to choose."""
    tries: dict[str, tuple[nn.Module, dict[str, Any]]] = {BATCH_FIRST: (model, {})}
    if time_steps is None and all(x.dim() > 2 for x in inputs):
        layouts = tuple("TNCHWD"[: x.dim()] for x in inputs)
        stepped = copy.deepcopy(model)
        set_step_mode(stepped, True)
        tries[",".join(layouts)] = (stepped, {"input_layout": layouts})
    failures = {name: _failure(*attempt, inputs, time_steps) for name, attempt in tries.items()}
    working = [name for name in tries if not failures[name]]
    if len(working) > 1:
        raise ConfigError("the inputs can be read in several layouts", fix="say --layout", choices=working)
    if not working:
        raise _none_works(failures)
    _say(f"layout: {working[0]} (the only one that works)", error=True)
    return tries[working[0]]


def _failure(
    model: nn.Module, dims: dict[str, Any], inputs: tuple[Any, ...], time_steps: int | None
) -> SnnpartError | str:
    """Why the model cannot be traced in this layout, or "" when it can, for any batch size."""
    try:
        fixed: str = _trace(model, inputs, dims, time_steps).batch_fixed
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
