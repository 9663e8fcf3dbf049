"""Options that several commands share, as dataclasses: a command takes one of them and its own options.

    @app.command()
    @takes(Compilation)
    def plan(asked: Compilation, output: Output = None) -> None: ...

`takes` gives typer a function with all fields as parameters, in the order of the class, the command's own after them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

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
Dp = Annotated[str, typer.Option(help="ddp or fsdp2: how data-parallel ranks hold the parameters")]
Microbatches = Annotated[int | None, typer.Option(help="parts of a batch in the pipeline; default pp")]
Schedule = Annotated[str | None, typer.Option(help="1f1b (default), gpipe, interleaved-1f1b, interleaved-zb or zbv")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="JSON of a plan to keep")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="file to write instead of the terminal")]
Execution = Annotated[str, typer.Option(help="how steps run: auto, eager, compile or cuda_graph")]
Precision = Annotated[str, typer.Option(help="fp32, bf16 or fp16")]
Trace = Annotated[Path | None, typer.Option(help="also write a Chrome trace of the steps to this file")]
Verify = Annotated[str, typer.Option(help="compare with the model: off, trace or full")]


@dataclass(frozen=True)
class Network:
    """Which model, and what it is called with."""

    model: Model
    input: Inputs
    arg: Arguments = None
    layout: Layout = None
    in_dims: InDims = None
    time_steps: Steps = None

    def options(self) -> dict[str, Any]:
        """Keywords of `parallelize`, without those that say where batch and time are."""
        return {"time_steps": self.time_steps}


@dataclass(frozen=True)
class Compilation(Network):
    """A network and the ranks it is compiled for."""

    tp: Tp = 1
    pp: Pp = 1
    dp: Dp = "ddp"
    microbatches: Microbatches = None
    schedule: Schedule = None
    plan: PlanFile = None

    def options(self) -> dict[str, Any]:
        """Keywords of `parallelize`, without those that say where batch and time are."""
        own = {name: getattr(self, name) for name in ("tp", "pp", "dp", "microbatches", "schedule", "plan")}
        return {**super().options(), **own}


def takes(kind: type[Network]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated command as a function of the fields of `kind` and its own parameters but the first."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            function(kind(**{field.name: given.pop(field.name) for field in fields(kind)}), **given)

        shared, own = get_type_hints(kind, include_extras=True), get_type_hints(function, include_extras=True)
        parameters = [_parameter(f.name, f.default, shared[f.name]) for f in fields(kind)]
        for name, parameter in list(inspect.signature(function).parameters.items())[1:]:
            parameters.append(_parameter(name, parameter.default, own[name]))
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return decorate


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
