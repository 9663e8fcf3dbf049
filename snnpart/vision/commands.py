"""`snnpart train|evaluate|predict|export CONFIG.toml`, and `snnpart init`, which writes a commented example.

    torchrun --nproc-per-node 4 -m snnpart train digits.toml --tp 2 --pp 2 --optimizer-kwargs lr=0.003

Every field of the configuration is also a flag, which wins over the file. The flags are made from the dataclass: what a
field is called, may hold and means stands in one place.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from snnpart.config import parse_arguments
from snnpart.errors import ConfigError, SnnpartError
from snnpart.vision.config import EvaluationConfig, PredictionConfig, RunConfig, TrainingConfig
from snnpart.vision.fields import read_toml, required

CONFIGS: Mapping[str, type[RunConfig]] = {
    "train": TrainingConfig,
    "evaluate": EvaluationConfig,
    "predict": PredictionConfig,
}


def main(command: str, arguments: Sequence[str]) -> int:
    """Run a command; 0 when all went well, 1 after a named error, 2 for wrong usage, 130 when it was interrupted."""
    try:
        options = vars(_PARSERS[command]().parse_args(arguments))
    except SystemExit as error:
        return int(error.code or 0)
    try:
        _COMMANDS[command](options)
    except SnnpartError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _run(command: str) -> Callable[[dict[str, Any]], None]:
    def run(options: dict[str, Any]) -> None:
        from snnpart import vision

        config = configured(CONFIGS[command], options)
        getattr(vision, command)(config)

    return run


def configured(cls: type[RunConfig], options: Mapping[str, Any]) -> Any:
    """The configuration of a file, `options["config"]`, and of the flags that were given."""
    given = {name: value for name, value in options.items() if name != "config" and value is not None}
    data = read_toml(options["config"]) if options["config"] else {}
    for name, value in given.items():
        data[name] = {**data.get(name, {}), **parse_arguments(value)} if name.endswith("_kwargs") else value
    return cls.from_dict(data)


def parser_of(command: str) -> argparse.ArgumentParser:
    """The command's flags, one a field."""
    cls = CONFIGS[command]
    parser = argparse.ArgumentParser(prog=f"snnpart {command}", description=_summary(cls))
    parser.add_argument("config", nargs="?", type=Path, help="a TOML file of these fields")
    hints, texts = get_type_hints(cls), descriptions(cls)
    for item in fields(cls):
        parser.add_argument(
            f"--{item.name.replace('_', '-')}",
            dest=item.name,
            default=None,
            help=texts.get(item.name, "").replace("%", "%%"),
            **_how(item.name, hints[item.name]),
        )
    return parser


def _how(name: str, hint: Any) -> dict[str, Any]:
    """How argparse reads a field."""
    if name.endswith("_kwargs"):
        return {"nargs": "*", "metavar": "NAME=VALUE"}
    kinds = (
        [k for k in get_args(hint) if k is not type(None)] if get_origin(hint) in (Union, types.UnionType) else [hint]
    )
    kind = kinds[0]
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": kind if kind in (int, float, Path) else str, "metavar": kind.__name__.upper()}


def descriptions(cls: type) -> dict[str, str]:
    """What the docstrings of a configuration and its bases say of each field."""
    found: dict[str, str] = {}
    for base in cls.__mro__:
        text = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")[2]
        for names, words in re.findall(r"^ {4}([\w, ]+): (.*(?:\n {8}.*)*)", text, re.MULTILINE):
            for name in names.split(","):
                found.setdefault(name.strip(), " ".join(words.split()))
    return found


def _summary(cls: type) -> str:
    return (cls.__doc__ or "").partition("\n")[0]


def example(cls: type[RunConfig]) -> str:
    """A commented TOML file with every field and its default."""
    texts, needed = descriptions(cls), {item.name for item in required(cls)}
    lines = [f"# {_summary(cls)} Fields that are commented out have the value shown."]
    for item in sorted(fields(cls), key=lambda item: item.name not in ("model", *needed)):
        lines += ["", *_wrapped(texts.get(item.name, "")), _assignment(item, item.name in needed)]
    return "\n".join(lines) + "\n"


_SHOWN = {
    "model": '"sew_resnet18"',
    "model_kwargs": "{ num_classes = 10, time_steps = 4 }",
    "dataset_kwargs": "{ size = 32, channels = 3 }",
    "output": '"predictions.h5"',
}


def _assignment(item: Field[Any], needed: bool) -> str:
    if item.name in _SHOWN:
        return f"{item.name} = {_SHOWN[item.name]}"
    value = item.default if not callable(item.default_factory) else item.default_factory()
    if value is None:
        return f"# {item.name} ="
    text = "{}" if value == {} else json.dumps(value)
    return f"{'' if needed else '# '}{item.name} = {text}"


def _wrapped(text: str, width: int = 100) -> list[str]:
    import textwrap

    return [f"# {line}" for line in textwrap.wrap(text, width)]


def _init_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="snnpart init", description="Write a commented example configuration.")
    parser.add_argument("path", nargs="?", type=Path, default=Path("train.toml"))
    parser.add_argument("--command", choices=list(CONFIGS), default="train")
    return parser


def _init(options: dict[str, Any]) -> None:
    path: Path = options["path"]
    if path.exists():
        raise ConfigError(f"{path} exists", fix="give another name; nothing was written")
    path.write_text(example(CONFIGS[options["command"]]), encoding="utf-8")
    print(f"wrote {path}")


def _export_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="snnpart export", description="Write the artifact of a training run's checkpoint. One process will do."
    )
    parser.add_argument("config", type=Path, help="the TOML file of the training")
    parser.add_argument("output", type=Path, help="the folder to write")
    parser.add_argument("--checkpoint", type=Path, default=None, help="default: the last whole one of checkpoint_dir")
    parser.add_argument("--average", action="store_true", help="the exponential average of the weights (ema)")
    return parser


def _export(options: dict[str, Any]) -> None:
    from snnpart.runtime.checkpoint import last_whole, read_model
    from snnpart.vision.artifact import write

    config = TrainingConfig.from_toml(options["config"])
    checkpoint = options["checkpoint"] or (last_whole(config.checkpoint_dir) if config.checkpoint_dir else None)
    if checkpoint is None:
        raise ConfigError("there is no whole checkpoint to export", fix="set checkpoint_dir, or give --checkpoint")
    weights = read_model(checkpoint)
    if options["average"]:
        weights = {**weights, **read_model(checkpoint, "ema")}
    write(options["output"], weights, config.to_dict())
    print(f"wrote {options['output']} from {checkpoint}")


_PARSERS: Mapping[str, Callable[[], argparse.ArgumentParser]] = {
    **{name: (lambda name=name: parser_of(name)) for name in CONFIGS},  # type: ignore[misc]
    "init": _init_parser,
    "export": _export_parser,
}
_COMMANDS: Mapping[str, Callable[[dict[str, Any]], None]] = {
    **{name: _run(name) for name in CONFIGS},
    "init": _init,
    "export": _export,
}
