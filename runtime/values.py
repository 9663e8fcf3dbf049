"""Where a rank's tensors take their first values from, when the model itself does not hold them.

A model that was made on the meta device has shapes and no numbers. At launch every rank asks a *source* for whole
tensors, one after the other on the CPU, keeps its slice of each on its device and drops the rest: at no time does it
hold more than its slices and one module (`reset_parameters`) or one tensor (the other sources).

    a mapping                      {name: tensor}, as `state_dict()` gives it
    a path                         a file of `torch.save` (read by memory map: only the slices are read), a
                                   `.safetensors` file, or a folder of such files
    a function                     f(name, shape, dtype) -> tensor
    nothing, for a meta model      `reset_parameters` of every module, in the order of `modules()`, after
                                   `torch.manual_seed(torch.initial_seed())` of rank 0: the numbers of one process that
                                   does `model.to_empty(device="cpu")` and the same

Names are the user's; a tied tensor is found under any of its names, and the last module that resets it counts.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from snnpart.errors import ConfigError, LaunchError
from snnpart.fingerprint import digest
from snnpart.graph import TensorInfo
from snnpart.program import CompiledProgram, StageProgram
from snnpart.runtime.ranks import Ranks
from snnpart.runtime.stage import Taken, local_copy

Source = Mapping[str, Tensor] | str | os.PathLike[str] | Callable[[str, tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True)
class ResetParameters:
    """The source that initialises a meta model module by module."""

    model: nn.Module


def take_values(
    compiled: CompiledProgram, mine: Sequence[StageProgram], ranks: Ranks, source: Source | ResetParameters
) -> Taken:
    """This rank's own tensors from `source`, cut and on its device, and whole ones that no stage uses. Collective.

    Raises:
        ConfigError: on every rank, when the source lacks a tensor or has another shape. LaunchError: ranks that read
        the same tensor were given different values.
    """
    parts = {part.name: part for program in mine for part in program.tensors}
    used = {part.name for program in compiled.stages.values() for part in program.tensors}
    infos = {n: info for n, info in compiled.source.tensors.items() if n in parts or n not in used}
    seed = ranks.gather(torch.initial_seed())[0]
    taken, seen = Taken(), {}
    problem: ConfigError | None = None
    try:
        for name, whole in _stream(source, infos, compiled.source.tensors, seed):
            _check_shape(name, whole, infos[name])
            own = whole.detach().to(infos[name].tensor.dtype)
            taken[name] = local_copy(parts[name], own, ranks.device) if name in parts else own.cpu().clone()
            if not isinstance(source, (str, os.PathLike)):
                seen[name] = digest(own)
    except ConfigError as error:
        problem = error
    ranks.agree(problem or _missing(infos, taken))
    _check_agree(ranks.gather(seen))
    return taken


def _stream(
    source: Source | ResetParameters, infos: Mapping[str, TensorInfo], every: Mapping[str, TensorInfo], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """The wanted tensors with their names, whole; a name may come again, with the value that counts."""
    if isinstance(source, ResetParameters):
        names = {id(info.tensor): name for name, info in every.items()}
        yield from ((name, x) for name, x in _reset(source.model, names, seed) if name in infos)
    elif isinstance(source, (str, os.PathLike)):
        yield from _found(_Files(Path(source)), infos)
    elif isinstance(source, Mapping):
        yield from _found(source, infos)
    elif callable(source):
        yield from ((name, source(name, tuple(info.tensor.shape), info.tensor.dtype)) for name, info in infos.items())
    else:
        raise ConfigError(
            f"values is a {type(source).__name__}",
            choices=("a mapping of names to tensors", "a path", "a function of name, shape and dtype"),
        )


def _found(values: Mapping[str, Tensor], infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
    for name, info in infos.items():
        key = next((key for key in (name, *info.aliases) if key in values), None)
        if key is not None:
            yield name, values[key]
        elif not info.tensor.is_meta:
            yield name, info.tensor


class _Files(Mapping[str, Tensor]):
    """The tensors of a checkpoint on disk; one is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        self._where: dict[str, Callable[[], Tensor]] = {}
        try:
            for file in files:
                self._where.update(_safetensors(file) if file.suffix == ".safetensors" else _mapped(file))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"the values in '{path}' cannot be read: {error}") from error
        if not self._where:
            raise ConfigError(f"'{path}' holds no tensors", fix="give a file of torch.save or .safetensors files")

    def __getitem__(self, name: str) -> Tensor:
        return self._where[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _mapped(file: Path) -> dict[str, Callable[[], Tensor]]:
    state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(state, Mapping):
        raise ConfigError(f"'{file}' holds a {type(state).__name__}, not a state_dict", fix="save model.state_dict()")
    return {name: lambda x=x: x for name, x in state.items() if isinstance(x, Tensor)}  # type: ignore[misc]


def _safetensors(file: Path) -> dict[str, Callable[[], Tensor]]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ConfigError(f"'{file}' needs safetensors", fix="pip install safetensors") from error
    opened = safe_open(file, framework="pt")
    return {name: lambda name=name: opened.get_tensor(name) for name in opened.keys()}  # type: ignore[misc]  # noqa: SIM118


def _reset(model: nn.Module, names: Mapping[int, str], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Each tensor as its module's `reset_parameters` makes it, one module in memory at a time."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        for path, module in model.named_modules():
            held = {**module._parameters, **module._buffers}
            blank = {name: x for name, x in held.items() if x is not None and x.is_meta}
            made = _materialised(path, module, blank) if blank else {}
            for name, old in held.items():
                if old is not None and id(old) in names:
                    yield names[id(old)], made.get(name, old)


def _materialised(path: str, module: nn.Module, blank: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's own tensors after its `reset_parameters`, called on a twin that owns memory."""
    where = f"module '{path}' ({type(module).__name__})"
    fix = "give launch(values=...): a state_dict, its file, or a function of name, shape and dtype"
    reset = "reset_parameters" if hasattr(module, "reset_parameters") else "_reset_parameters"
    if not hasattr(module, reset):
        raise ConfigError(f"{sorted(blank)} are on the meta device and nothing initialises them", where=where, fix=fix)
    twin = copy.copy(module)
    made = {name: _unset(x) for name, x in blank.items()}
    own = vars(twin)
    own["_parameters"] = {n: made.get(n, p) for n, p in module._parameters.items()}
    own["_buffers"] = {n: made.get(n, b) for n, b in module._buffers.items()}
    getattr(twin, reset)()
    forgotten = sorted(name for name, x in made.items() if _is_unset(x))
    if forgotten:
        raise ConfigError(f"{reset} leaves {forgotten} without values", where=where, fix=fix)
    return made


def _unset(x: Tensor) -> Tensor:
    """Memory for x, filled with what no initialisation writes."""
    blank = torch.full(x.shape, _mark(x), dtype=x.dtype)
    return nn.Parameter(blank, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else blank


def _is_unset(x: Tensor) -> bool:
    mark = _mark(x)
    return bool((x.isnan() if mark != mark else x == mark).any()) or x.dtype is torch.bool


def _mark(x: Tensor) -> Any:
    if x.dtype is torch.bool:
        return True
    return float("nan") if x.is_floating_point() or x.is_complex() else torch.iinfo(x.dtype).max


def _check_shape(name: str, x: Any, info: TensorInfo) -> None:
    if not isinstance(x, Tensor) or x.shape != info.tensor.shape:
        found = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ConfigError(f"values has {found} for '{name}', which has shape {tuple(info.tensor.shape)}")


def _missing(infos: Iterable[str], taken: Mapping[str, Tensor]) -> ConfigError | None:
    lacking = [name for name in infos if name not in taken]
    if not lacking:
        return None
    return ConfigError(f"values lacks {lacking[:5]}", fix="give every tensor that is on the meta device")


def _check_agree(everyone: Sequence[Mapping[str, str]]) -> None:
    known: dict[str, str] = {}
    for rank, seen in enumerate(everyone):
        for name, value in seen.items():
            if known.setdefault(name, value) != value:
                raise LaunchError(
                    f"rank {rank} was given other values of '{name}' than the ranks before it",
                    fix="give the same values on every rank; seed a function that draws them",
                )
