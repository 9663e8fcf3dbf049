"""Configurations as data: plain values in, checked frozen dataclasses out.

A configuration is a frozen keyword-only dataclass of plain values (text, numbers, flags, lists, tables), so that it
reads from TOML, prints as JSON and travels in a checkpoint. What a field may hold is its annotation; the annotation is
checked when the object is made, so that a wrong word is found before anything is built, and named with its field.
"""

from __future__ import annotations

import difflib
import sys
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from snnpart.errors import ConfigError


class Configuration:
    """Base of the configuration dataclasses: checks itself, `to_dict`, `from_dict`, `from_toml`."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):  # type: ignore[arg-type]
            object.__setattr__(self, item.name, checked(item.name, getattr(self, item.name), hints[item.name]))
        self.check()

    def check(self) -> None:
        """Relations between fields; ConfigError."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values.

        Raises:
            ConfigError: a field holds a module or another object, which no file can hold.
        """
        data = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        odd = [name for name, value in data.items() if not _is_plain(value)]
        if odd:
            raise ConfigError(
                f"{odd[0]} is a {type(data[odd[0]]).__name__}, which a file cannot hold",
                fix="give the import path of a factory, package.module:name, and its keywords",
            )
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def described(self) -> dict[str, Any]:
        """All fields as JSON holds them, for a file that tells of a run that may have been given objects in Python.

        A function or class of a module is its import path; None stands for a field that holds something else, and for
        the factory of keywords that do.
        """
        values = {item.name: _written(getattr(self, item.name)) for item in fields(self)}  # type: ignore[arg-type]
        lost = {name.removesuffix("_kwargs") for name, value in values.items() if value is _UNWRITTEN}
        return {name: None if value is _UNWRITTEN or name in lost else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The configuration of these fields; an unknown one is refused with the nearest name."""
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
        for name in data:
            if name not in known:
                raise unknown(name, known)
        missing = [item.name for item in required(cls) if item.name not in data]
        if missing:
            raise ConfigError(f"{cls.__name__} needs {' and '.join(missing)}", fix=f"add {missing[0]} = ...")
        return cls(**data)

    @classmethod
    def from_toml(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Self:
        """The configuration in a TOML file, with fields of `overrides` instead of the file's."""
        return cls.from_dict({**read_toml(path), **(overrides or {})})


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file; ConfigError with line and column where it cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", fix="`snnpart init` writes an example") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def required(cls: type) -> list[Field[Any]]:
    """The fields that have no default."""
    from dataclasses import MISSING

    return [f for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]


def unknown(name: str, known: Iterable[str]) -> ConfigError:
    """For a field that does not exist: the nearest that does, or all of them."""
    near = difflib.get_close_matches(name, list(known), n=1)
    if near:
        return ConfigError(f"there is no field {name!r}", fix=f"did you mean {near[0]!r}?")
    return ConfigError(f"there is no field {name!r}", choices=sorted(known))


def checked(name: str, value: Any, hint: Any) -> Any:
    """`value` as the annotation wants it (lists become tuples, whole numbers floats); ConfigError names the field."""
    origin, options = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if value not in options:
            raise ConfigError(f"{name} = {value!r} is not a choice", choices=options)
        return value
    if origin in (Union, types.UnionType):
        return _one_of(name, value, options)
    return _of_kind(name, value, origin or hint, options)


def _one_of(name: str, value: Any, options: tuple[Any, ...]) -> Any:
    if value is None and type(None) in options:
        return None
    kinds = [option for option in options if option is not type(None)]
    errors = []
    for kind in kinds:
        try:
            return checked(name, value, kind)
        except ConfigError as error:
            errors.append(error)
    raise (
        errors[0]
        if len(errors) == 1
        else ConfigError(f"{name} = {value!r} is of no kind that it can be", choices=[_spoken(kind) for kind in kinds])
    )


def _of_kind(name: str, value: Any, kind: Any, options: tuple[Any, ...]) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is tuple and isinstance(value, (list, tuple)):
        return tuple(checked(f"{name}[{i}]", item, options[0]) for i, item in enumerate(value))
    if kind is dict and isinstance(value, Mapping):
        return dict(value)
    right = isinstance(value, kind) and not (kind in (int, float) and isinstance(value, bool))
    if not right:
        raise ConfigError(f"{name} = {value!r} is not {_spoken(kind)}")
    return value


def _spoken(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
    return {**words, dict: "a table", tuple: "a list"}.get(
        get_origin(kind) or kind, getattr(kind, "__name__", str(kind))
    )


_UNWRITTEN = object()


def _written(value: Any) -> Any:
    """The value as JSON holds it, or `_UNWRITTEN`."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        items = {key: _written(item) for key, item in value.items()}
        return items if _is_plain(items) else _UNWRITTEN
    if isinstance(value, (list, tuple)):
        listed = [_written(item) for item in value]
        return listed if _is_plain(listed) else _UNWRITTEN
    return value if _is_plain(value) else _import_path(value)


def _import_path(value: Any) -> Any:
    """`package.module:name` where that is this very object, so that whoever reads it gets the same."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module in (None, "__main__") or name is None:
        return _UNWRITTEN
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is value else _UNWRITTEN


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool, Path))


def positive(configuration: Any, *names: str, zero: bool = False) -> None:
    """ConfigError for the first of these fields that is set and not positive (`zero`: 0 will do)."""
    for name in names:
        value = getattr(configuration, name)
        if value is not None and not (value > 0 or (zero and value == 0)):
            raise ConfigError(f"{name} = {value!r} is not {'0 or more' if zero else 'positive'}")
