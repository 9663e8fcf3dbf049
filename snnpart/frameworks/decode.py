"""A leaf from its JSON data: the reading half of `encode`.

Only classes and functions that live in an allowed package are looked up; objects are built with `object.__new__` and
their attributes set, so no constructor runs. Data that asks for anything else is refused by name.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.errors import CheckpointError
from snnpart.frameworks.clone import hold_tensors, settle
from snnpart.frameworks.encode import find, inner_codes
from snnpart.frameworks.registry import packages

_PLAIN = ("builtins:dict", "collections:OrderedDict", "collections:defaultdict")


def decode_leaf(
    data: Mapping[str, Any], tensors: Mapping[str, Tensor], *, modules: Collection[str] | None = None
) -> nn.Module:
    """The module that `encode_leaf` described, with its state reset.

    Args:
        tensors: names relative to the leaf -> its tensors, taken as they are.
        modules: names of the top-level packages whose classes and functions may be imported, besides torch. Default:
            the frameworks that snnpart has adapters for.

    Raises:
        CheckpointError: a class that cannot be imported or is not allowed, a tensor that is missing, damaged data.
    """
    allowed = frozenset(("torch", *(packages() if modules is None else modules)))
    reader = _Reader(tensors, allowed)
    try:
        reader.allocate(data, "")
        for path, module in list(reader.made.items()):
            reader.fill(module, _described(data, path), path + "." if path else "")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the description of a neuron layer is damaged: {error!r}") from error
    settle(reader.made[""])
    return reader.made[""]


def decode_hooks(data: list[Any], *, modules: Collection[str]) -> list[Callable[[Tensor], Any]]:
    """The hooks that `encode_hooks` described; `modules` as for `decode_leaf`."""
    reader = _Reader({}, frozenset(("torch", *modules)))
    return [reader.value(hook) for hook in data]


def _described(data: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    return functools.reduce(lambda found, name: found["modules"][name], path.split("."), data) if path else data


def leaf_packages(data: Any) -> set[str]:
    """The top-level packages that reading this data imports from."""
    if isinstance(data, Mapping):
        named = {
            str(data[key]).partition(".")[0].partition(":")[0] for key in ("class", "path", "maker") if key in data
        }
        return named.union(*(leaf_packages(item) for item in data.values())) - {""}
    return set().union(*(leaf_packages(item) for item in data)) if isinstance(data, list) else set()


@functools.cache
def _tensor_functions() -> frozenset[Any]:
    """torch's functions on tensors, by torch's own list."""
    listed = torch.overrides.get_overridable_functions()
    return frozenset(function for functions in listed.values() for function in functions)


@dataclass
class _Reader:
    """What reading one leaf needs: its tensors, what may be imported, and the modules made so far by path."""

    tensors: Mapping[str, Tensor]
    allowed: frozenset[str]
    made: dict[str, nn.Module] = field(default_factory=dict)
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def allocate(self, data: Mapping[str, Any], path: str) -> None:
        """Make the modules, empty: attributes may point at any of them."""
        kind = self.load(data["class"])
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise CheckpointError(f"{data['class']} is not a module class")
        module = object.__new__(kind)
        nn.Module.__init__(module)
        self.made[path] = module
        for name, child in data["modules"].items():
            if child is not None and "shared" not in child:
                self.allocate(child, f"{path}.{name}" if path else name)

    def fill(self, module: nn.Module, data: Mapping[str, Any], prefix: str) -> None:
        module.training = bool(data["training"])
        for name, child in data["modules"].items():
            path = None if child is None else child.get("shared", prefix + name)
            module._modules[name] = None if path is None else self.made[path]
        for name, held in data["parameters"].items():
            module._parameters[name] = None if held is None else self.parameter(held)
        for name, held in data["buffers"].items():
            module.register_buffer(
                name, None if held is None else self.buffer(held), bool((held or {}).get("persistent"))
            )
        attributes = vars(module)
        for name, value in data["attributes"].items():
            attributes[name] = self.value(value)
        hold_tensors(module, self.tensors, prefix)

    def parameter(self, data: Mapping[str, Any]) -> nn.Parameter:
        name = data["tensor"]
        if name not in self.parameters:
            tensor = self.tensor(data)
            made = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, bool(data["requires_grad"]))
            for hook in data.get("hooks", ()) if made.requires_grad else ():
                made.register_hook(self.value(hook))
            self.parameters[name] = made
        return self.parameters[name]

    def buffer(self, data: Mapping[str, Any]) -> Tensor:
        return torch.zeros(0, dtype=_dtype(data["empty"])) if "empty" in data else self.tensor(data)

    def tensor(self, data: Mapping[str, Any]) -> Tensor:
        found = self.tensors.get(data["tensor"])
        if found is not None:
            return found
        if "data" not in data:
            raise CheckpointError(f"the tensor '{data['tensor']}' of a neuron layer is missing among the weights")
        made = torch.tensor(data["data"], dtype=_dtype(data["dtype"]))
        return made.requires_grad_(bool(data["requires_grad"]))

    def load(self, path: str) -> Any:
        """A class or function of an allowed package; of torch only modules, surrogates and tensor functions."""
        package = path.partition(":")[0].partition(".")[0]
        try:
            found = find(path) if package in self.allowed or path in _PLAIN else None
        except (ImportError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be imported: {error}", fix=f"install the package '{package}' of the saved version"
            ) from error
        if path not in _PLAIN and not self._may_use(found):
            raise CheckpointError(
                f"{path} may not be imported: it is no class or function of an allowed package",
                choices=sorted(self.allowed),
            )
        return found

    def _may_use(self, found: Any) -> bool:
        home = (getattr(found, "__module__", None) or "torch").partition(".")[0]
        if home not in self.allowed:
            return False
        if home != "torch":
            return isinstance(found, (type, types.FunctionType))
        if isinstance(found, type):
            return issubclass(found, (nn.Module, torch.autograd.Function))
        return found in _tensor_functions()

    def value(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self.value(item) for item in data]
        if not isinstance(data, Mapping):
            return data
        return getattr(self, f"_{data['kind']}")(data)

    def _float(self, data: Mapping[str, Any]) -> float:
        return float(data["value"])

    def _size(self, data: Mapping[str, Any]) -> torch.Size:
        return torch.Size(data["items"])

    def _tuple(self, data: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(self.value(item) for item in data["items"])

    def _set(self, data: Mapping[str, Any]) -> set[Any]:
        return set(self._tuple(data))

    def _frozenset(self, data: Mapping[str, Any]) -> frozenset[Any]:
        return frozenset(self._tuple(data))

    def _namedtuple(self, data: Mapping[str, Any]) -> Any:
        kind = self.load(data["class"])
        return tuple.__new__(kind, [self.value(data["fields"][name]) for name in kind._fields])

    def _dict(self, data: Mapping[str, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = self.load(data["class"])()
        made.update((self.value(key), self.value(item)) for key, item in data["items"])
        return made

    def _tensor(self, data: Mapping[str, Any]) -> Tensor:
        return self.tensor(data)

    def _module(self, data: Mapping[str, Any]) -> nn.Module:
        return self.made[data["path"]]

    def _dtype(self, data: Mapping[str, Any]) -> torch.dtype:
        return _dtype(data["name"])

    def _device(self, data: Mapping[str, Any]) -> torch.device:
        return torch.device(data["name"])

    def _enum(self, data: Mapping[str, Any]) -> Any:
        return self.load(data["class"])[data["name"]]

    def _import(self, data: Mapping[str, Any]) -> Any:
        return self.load(data["path"])

    def _partial(self, data: Mapping[str, Any]) -> Any:
        function, arguments, keywords = (self.value(part) for part in data["parts"])
        return functools.partial(function, *arguments, **keywords)

    def _method(self, data: Mapping[str, Any]) -> Any:
        if "class" in data:
            return getattr(self.load(data["class"]), data["name"])
        owner = self.value(data["of"])
        return types.MethodType(getattr(type(owner), data["name"]), owner)

    def _closure(self, data: Mapping[str, Any]) -> types.FunctionType:
        maker = self.load(data["maker"])
        codes = list(inner_codes(data["maker"]))
        code = codes[data["at"]] if data["at"] < len(codes) else None
        if code is None or code.co_qualname != data["name"] or len(code.co_freevars) != len(data["cells"]):
            raise CheckpointError(
                f"the function {data['name']} of {data['maker']} is not the one that was saved",
                fix="install the version of the package that the program was saved with",
            )
        cells = tuple(types.CellType(self.value(cell)) for cell in data["cells"])
        made = types.FunctionType(code, maker.__globals__, code.co_name, self.value(data["defaults"]), cells)
        made.__kwdefaults__, made.__qualname__ = self.value(data["kwdefaults"]), code.co_qualname
        made.__module__ = maker.__module__
        return made

    def _object(self, data: Mapping[str, Any]) -> Any:
        made = object.__new__(self.load(data["class"]))
        vars(made).update({name: self.value(item) for name, item in data["state"].items()})
        return made


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{name!r} is not a dtype")
    return found
