"""Words of the command line: what a model, an input and a factory argument are spelled like.

package.module:Factory                  a function, a class, or a module object that is already made
float32[4,32,3,128,128]                 an input: dtype and shape, filled with random numbers
name=3, name=true, name=none, name=ADD  a factory argument: a number, a flag, None, or text
name=@package.module:Object             a factory argument that is imported
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.errors import ConfigError
from snnpart.frameworks.factories import prepare_factory

_INPUT = re.compile(r"(\w+)\[\s*([\d\s,]*)\]")
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None}
_TYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_DTYPES: Mapping[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}


def import_object(path: str) -> Any:
    """The object at `package.module:name`, looked for in the current folder too.

    Raises:
        ConfigError: no colon, no such module, or no such name in it.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and module_name and name):
        raise ConfigError(f"{path!r} is not MODULE:NAME", fix="write it as package.module:factory")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"module '{module_name}' cannot be imported: {error}",
            fix="install it, or run the command in the folder that holds it",
        ) from error
    for atom in name.split("."):
        if not hasattr(found, atom):
            raise ConfigError(f"'{module_name}' has no '{name}'", choices=_callables(found))
        found = getattr(found, atom)
    return found


def _callables(holder: Any) -> list[str]:
    """At most a dozen public callables of the module, for a message."""
    return [name for name, item in vars(holder).items() if callable(item) and not name.startswith("_")][:12]


def parse_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """Factory arguments from `name=value` texts; ConfigError for one without `=`."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"{text!r} is not NAME=VALUE", fix="write --arg num_classes=10")
        found[name] = _parse_value(value)
    return found


def _parse_value(text: str) -> Any:
    if text.startswith("@"):
        return import_object(text[1:])
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def make_model(path: str, arguments: Iterable[str] = (), *, dtype: torch.dtype | None = None) -> nn.Module:
    """The module that the factory at `path` makes; `dtype` casts its floating-point tensors.

    Raises:
        ConfigError: the path or an argument is not understood, the factory fails, or what it makes is no module.
    """
    target = import_object(path)
    given = parse_arguments(arguments)
    model = target if isinstance(target, nn.Module) else _call(target, prepare_factory(target, given), path)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{path} gives a {type(model).__name__}, not a torch.nn.Module")
    return model if dtype is None else model.to(dtype)


def _call(factory: Callable[..., Any], arguments: dict[str, Any], path: str) -> Any:
    if not callable(factory):
        raise ConfigError(f"{path} is a {type(factory).__name__}, neither a factory nor a torch.nn.Module")
    try:
        return factory(**arguments)
    except Exception as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ConfigError(
            f"{path}({shown}) failed: {type(error).__name__}: {error}", fix="give its arguments as --arg name=value"
        ) from error


def make_input(text: str, seed: int = 0) -> Tensor:
    """A random tensor for `dtype[shape]`: uniform in [0, 1), or 0 and 1 for whole numbers; ConfigError otherwise."""
    match = _INPUT.fullmatch(text.strip())
    if match is None or match[1] not in _DTYPES:
        raise ConfigError(f"{text!r} is not an input", fix="write it as float32[32,3,64,64]", choices=_DTYPES)
    shape = [int(size) for size in match[2].split(",") if size.strip()]
    if 0 in shape:
        raise ConfigError(f"{text!r} has a dim of size 0", fix="give every dim a size of at least 1")
    generator = torch.Generator().manual_seed(seed)
    dtype = _DTYPES[match[1]]
    random = torch.rand(shape, generator=generator, dtype=torch.float64)
    return random.to(dtype) if dtype.is_floating_point or dtype.is_complex else (random < 0.5).to(dtype)
