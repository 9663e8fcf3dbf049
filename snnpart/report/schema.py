"""The JSON schema of a report, made from the annotations of `report.data`.

python -m snnpart.report.schema > docs/report-schema.json
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
import typing
from typing import Any

from snnpart.report import data

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of `Report.to_json()`."""
    whole = _object(data.Report)
    whole["properties"] = {"version": {"const": data.VERSION}, **whole["properties"]}
    whole["required"] = ["version", *whole["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "snnpart report", **whole}


def _object(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {
        "description": " ".join((inspect.getdoc(kind) or "").split()),
        "type": "object",
        "properties": {name: _of(hints[name]) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _of(hint: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _object(hint)
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return {"type": "array", "items": _of(arguments[0])}
    if origin is dict:
        return {"type": "object"}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_of(argument) for argument in arguments]}
    raise TypeError(f"no schema for {hint!r}")


if __name__ == "__main__":
    print(json.dumps(schema(), indent=1))
