"""Names of call targets, both ways.

A graph may call: the tensor functions of torch (those behind `torch`, `torch.nn.functional`, `torch.linalg`,
`torch.special`, `torch.fft`), the arithmetic of `operator`, `snnpart.ops`, `snnpart.ops_fold`, `snnpart.ops_later`,
`snnpart.ops_norm`, `snnpart.ops_pool` and `snnpart.ops_time`.
Nothing else resolves, so that reading a graph cannot call into files, pickles or the system. Classes (surrogates,
NamedTuples) are imported by `module:qualname`; only subclasses of `autograd.Function` and of NamedTuple are accepted,
and only from the modules that the caller allows.
"""

from __future__ import annotations

import importlib
import operator
import types
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import torch

from snnpart import ops, ops_fold, ops_later, ops_layout, ops_norm, ops_pool, ops_time
from snnpart.errors import ConfigError

Function = Callable[..., Any]

_REFUSED = frozenset({"from_file", "frombuffer", "from_numpy"})
_OPERATORS = "add sub mul truediv floordiv mod pow matmul neg pos abs invert and_ or_ xor eq ne lt le gt ge getitem"
_OWN: tuple[Function, ...] = (
    ops.batch_norm,
    ops.batch_norm_copies,
    ops.assign,
    ops.index_assign,
    ops.embedding_rows,
    ops.vacant,
    ops.affine,
    ops.all_reduce,
    ops.grad_all_reduce,
    ops.all_gather,
    ops.shard,
    ops.reduce_scatter,
    ops_later.later,
    *ops_time.TIME_OPS,
    *ops_norm.NORM_OPS,
    *ops_fold.FOLD_OPS,
    *ops_pool.POOL_OPS,
    *ops_layout.LAYOUT_OPS,
)
_NAMESPACES = ("torch", "torch.nn.functional", "torch.linalg", "torch.special", "torch.fft")
_PYTHON_FACTORIES = ("tensor", "as_tensor", "arange")


@cache
def table() -> dict[str, Function]:
    """Every function that a graph may call, by its public path."""
    found: dict[str, Function] = {}
    for path, function in _candidates():
        found.setdefault(path, function)
    return found


@cache
def _paths() -> dict[Function, str]:
    names: dict[Function, str] = {}
    for path, function in table().items():
        names.setdefault(function, path)
    return names


def _candidates() -> Iterator[tuple[str, Function]]:
    yield from ((f"operator.{name}", getattr(operator, name)) for name in _OPERATORS.split())
    yield from ((f"{function.__module__}.{function.__name__}", function) for function in _OWN)
    for path in _NAMESPACES:
        yield from _tensor_functions(importlib.import_module(path), path)


def _tensor_functions(module: types.ModuleType, path: str) -> Iterator[tuple[str, Function]]:
    """Functions of a namespace that take or make tensors: torch's own list of overridable ones, and the factories."""
    for name, value in vars(module).items():
        public = callable(value) and not isinstance(value, type) and not name.startswith("_") and not name.endswith("_")
        if (
            public
            and name not in _REFUSED
            and (id(value) in _overridable() or name in _PYTHON_FACTORIES or _is_native(value))
        ):
            yield f"{path}.{name}", value


@cache
def _overridable() -> frozenset[int]:
    listed = torch.overrides.get_overridable_functions()
    return frozenset(id(function) for functions in listed.values() for function in functions)


def _is_native(value: Any) -> bool:
    """A tensor function implemented in C: those are static methods of one class, other C functions are a module's."""
    if not isinstance(value, types.BuiltinFunctionType):
        return False
    owner: object = value.__self__
    return owner is None or isinstance(owner, type)


def path_of(function: Function) -> str:
    """The public path of a function; `module:qualname` when it has none (such a graph prints, but does not parse)."""
    try:
        known = _paths().get(function)
    except TypeError:
        known = None
    return known or class_path(function)


def class_path(item: Any) -> str:
    """`module:qualname`."""
    return f"{item.__module__}:{item.__qualname__}"


def import_class(path: str, base: type, modules: Collection[str] | None) -> Any:
    """The class at `module:qualname`.

    `modules` are the top-level modules that may be imported for it (None: any).

    Raises:
        ConfigError: it is not allowed, not importable, or no subclass of `base`.
    """
    module, _, qualname = path.partition(":")
    if modules is not None and module not in modules and module.split(".")[0] not in modules:
        raise ConfigError(f"the class '{path}' lies outside the modules this graph may import", choices=sorted(modules))
    try:
        found: Any = importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the class '{path}' cannot be imported: {error}",
            fix="define it at the top level of a module that is importable here",
        ) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"'{path}' is not a subclass of {base.__name__}")
    return found
