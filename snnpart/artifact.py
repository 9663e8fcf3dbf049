"""A compiled program as a directory, to run without the user's source files and without tracing again.

    program.json          what the other files are, their checksums, the fingerprint, stages, ports, slices, leaves
    plan.json             the plan, as `Plan.to_json` writes it
    source.txt            the analysed source graph (text form, docs/ir.md)
    stage0_tp0.txt ...    the graph of each (stage, tp rank)
    eval0_tp0.txt ...     that of its evaluations, where it is another one
    weights.safetensors   full tensors under the user's names

No pickle. Reading imports the classes of neurons and surrogates, from the packages that program.json lists, and runs
nothing else. A directory is written beside its place and renamed into it, so that it is whole or not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from snnpart import frameworks, text
from snnpart.errors import CheckpointError, ConfigError
from snnpart.facts import Value
from snnpart.fingerprint import fingerprint
from snnpart.footprint import Footprint
from snnpart.graph import SpikeGraph
from snnpart.ops import Surrogate
from snnpart.ops_time import all_nodes
from snnpart.plan import Plan
from snnpart.program import Action, CompiledProgram, PassRecord, Port, StageProgram, TensorSlice

FORMAT, VERSION = "snnpart program", 2
PROGRAM, PLAN, SOURCE, WEIGHTS = "program.json", "plan.json", "source.txt", "weights.safetensors"


def save(
    compiled: CompiledProgram, directory: str | os.PathLike[str], values: Mapping[str, Tensor] | None = None
) -> None:
    """Write the program to `directory`, which is replaced if it holds a saved program.

    Args:
        values: full tensors by the user's names (`RunningProgram.state_dict()`) instead of those it was compiled with.

    Raises:
        CheckpointError: the directory holds something else, or a neuron layer cannot be described as data.
    """
    target = Path(directory).absolute()
    if target.exists() and not (target / PROGRAM).exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not a saved program", fix="give a new or empty directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        _write(compiled, new, values or {})
        if target.exists():
            target.rename(old)
        new.rename(target)


def load(directory: str | os.PathLike[str], *, modules: Collection[str] | None = None) -> CompiledProgram:
    """Read a saved program.

    Args:
        modules: packages whose classes may be imported; default: those the program lists.

    Raises:
        CheckpointError: a file is missing, damaged or of another version, or a class cannot be imported.
    """
    folder = Path(directory)
    head = _read_head(folder)
    _check_files(folder, head)
    try:
        compiled = _read(folder, head, head["modules"] if modules is None else modules)
    except (ConfigError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{error}", where=str(folder), fix="save the program again with this snnpart") from error
    saved, found = head["fingerprint"], fingerprint(compiled)
    wrong = [what for what in ("plan", "stage graphs", "schedule") if saved[what] != found[what]]
    if wrong:
        raise CheckpointError(
            f"the {' and the '.join(wrong)} read back differ from what was saved",
            where=str(folder),
            fix="save the program again with this snnpart",
        )
    return compiled


def _write(compiled: CompiledProgram, folder: Path, values: Mapping[str, Tensor]) -> None:
    source = compiled.source
    tensors = {name: values.get(name, info.tensor) for name, info in source.tensors.items()}
    tensors = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    save_file(tensors, folder / WEIGHTS)
    (folder / PLAN).write_text(compiled.plan.to_json())
    (folder / SOURCE).write_text(text.print_graph(source))
    for key, stage in compiled.stages.items():
        (folder / _stage_file(*key)).write_text(text.print_fx(stage.graph))
        if stage.evaluation is not None:
            (folder / _evaluation_file(*key)).write_text(text.print_fx(stage.evaluation))
    files = sorted(path.name for path in folder.iterdir())
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": source.name,
        "fingerprint": fingerprint(compiled),
        "checksums": {name: _checksum(folder / name) for name in files},
        "modules": sorted(_modules(compiled)),
        "leaves": {path: frameworks.encode_leaf(info.module) for path, info in source.leaves.items()},
        "hooks": _hooks(source),
        "stages": [_stage_data(stage) for _, stage in sorted(compiled.stages.items())],
        "schedule": {str(rank): [str(action) for action in actions] for rank, actions in compiled.schedule.items()},
        "passes": [asdict(record) for record in compiled.passes],
        "notices": list(compiled.notices),
    }
    (folder / PROGRAM).write_text(json.dumps(head, indent=1))


def _read_head(folder: Path) -> dict[str, Any]:
    try:
        head: dict[str, Any] = json.loads((folder / PROGRAM).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{PROGRAM} cannot be read: {error}", where=str(folder), fix="give a saved program"
        ) from error
    if head.get("format") != FORMAT or head.get("version") != VERSION:
        raise CheckpointError(
            f"{PROGRAM} is of format {head.get('format')!r} version {head.get('version')!r}, not {FORMAT!r} {VERSION}",
            where=str(folder),
            fix="save the program again with this snnpart",
        )
    return head


def _check_files(folder: Path, head: Mapping[str, Any]) -> None:
    for name, checksum in head["checksums"].items():
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise CheckpointError(f"{name} is missing", where=str(folder), fix="copy the whole directory again")
        if _checksum(path) != checksum:
            raise CheckpointError(f"{name} is damaged: its checksum is not the saved one", where=str(folder))


def _read(folder: Path, head: Mapping[str, Any], modules: Collection[str]) -> CompiledProgram:
    values = load_file(folder / WEIGHTS)
    parts = [part for stage in head["stages"] for part in stage["tensors"]]
    tied = {alias: values[part["name"]] for part in parts for alias in part["aliases"]}
    leaves: dict[str, nn.Module] = {}
    for path, data in head["leaves"].items():
        inside = {n[len(path) + 1 :]: t for n, t in {**values, **tied}.items() if n.startswith(f"{path}.")}
        leaves[path] = frameworks.decode_leaf(data, inside, modules=modules)
    source = text.parse_graph((folder / SOURCE).read_text(), tensors=values, leaves=leaves, modules=modules)
    _mark_learned(source, head)
    _read_hooks(source, head, modules)
    stages = [_read_stage(folder, data, source, modules, head["checksums"]) for data in head["stages"]]
    return CompiledProgram(
        source=source,
        plan=Plan.from_json((folder / PLAN).read_text()),
        stages={(stage.stage, stage.tp_rank): stage for stage in stages},
        schedule={int(rank): tuple(map(Action.parse, actions)) for rank, actions in head["schedule"].items()},
        passes=tuple(PassRecord(**record) for record in head["passes"]),
        notices=tuple(head["notices"]),
    )


def _mark_learned(source: SpikeGraph, head: Mapping[str, Any]) -> None:
    """safetensors keeps no `requires_grad`; the slices do."""
    learned = {part["name"] for stage in head["stages"] for part in stage["tensors"] if part["requires_grad"]}
    for name, info in source.tensors.items():
        tensor = info.tensor.requires_grad_(name in learned)
        source.tensors[name] = replace(
            info, tensor=nn.Parameter(tensor, name in learned) if info.kind == "parameter" else tensor
        )


def _hooks(source: SpikeGraph) -> dict[str, list[Any]]:
    """The gradient hooks of tensors that belong to no leaf, by name."""
    free = {name: info.tensor for name, info in source.tensors.items() if info.leaf is None}
    return {name: data for name, tensor in free.items() if (data := frameworks.encode_hooks(tensor, name))}


def _read_hooks(source: SpikeGraph, head: Mapping[str, Any], modules: Collection[str]) -> None:
    for name, data in head.get("hooks", {}).items():
        for hook in frameworks.decode_hooks(data, modules=modules):
            source.tensors[name].tensor.register_hook(hook)


def _stage_file(stage: int, tp_rank: int) -> str:
    return f"stage{stage}_tp{tp_rank}.txt"


def _evaluation_file(stage: int, tp_rank: int) -> str:
    return f"eval{stage}_tp{tp_rank}.txt"


def _stage_data(stage: StageProgram) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "tp_rank": stage.tp_rank,
        "reads": list(stage.reads),
        "receives": [_port_data(port) for port in stage.receives],
        "sends": [_port_data(port) for port in stage.sends],
        "tensors": [{**asdict(part), "dtype": str(part.dtype).removeprefix("torch.")} for part in stage.tensors],
        "leaves": list(stage.leaves),
        "forward_us": stage.forward_us,
        "backward_us": stage.backward_us,
        "footprint": asdict(stage.footprint),
    }


def _read_stage(
    folder: Path, data: Mapping[str, Any], source: SpikeGraph, modules: Collection[str], known: Collection[str]
) -> StageProgram:
    """`known` are the files that the program lists."""
    written = (folder / _stage_file(data["stage"], data["tp_rank"])).read_text()
    other = folder / _evaluation_file(data["stage"], data["tp_rank"])
    return StageProgram(
        stage=data["stage"],
        tp_rank=data["tp_rank"],
        graph=text.parse_fx(written, modules=modules),
        reads=tuple(data["reads"]),
        receives=tuple(map(_read_port, data["receives"])),
        sends=tuple(map(_read_port, data["sends"])),
        tensors=tuple(map(_read_slice, data["tensors"])),
        leaves={path: source.leaves[path] for path in data["leaves"]},
        forward_us=data["forward_us"],
        backward_us=data["backward_us"],
        footprint=Footprint(**data["footprint"]),
        evaluation=text.parse_fx(other.read_text(), modules=modules) if other.name in known else None,
    )


def _port_data(port: Port) -> dict[str, Any]:
    return {
        "name": port.name,
        "states": port.states,
        **asdict(port.value),
        "dtype": str(port.value.dtype).removeprefix("torch."),
    }


def _read_port(data: Mapping[str, Any]) -> Port:
    shape, slopes, stride = (tuple(data[key]) for key in ("shape", "slopes", "stride"))
    value = Value(shape, _dtype(data["dtype"]), slopes, stride, data["requires_grad"])
    return Port(data["name"], value, tuple(data["states"]) if data["states"] else None)


def _read_slice(data: Mapping[str, Any]) -> TensorSlice:
    changed = {
        "dtype": _dtype(data["dtype"]),
        "global_shape": tuple(data["global_shape"]),
        "pieces": tuple((start, stop) for start, stop in data["pieces"]),
        "aliases": tuple(data["aliases"]),
        "stages": tuple(data.get("stages", ())),
    }
    return TensorSlice(**{**data, **changed})


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"{name!r} is not a dtype")
    return found


def _modules(compiled: CompiledProgram) -> Iterator[str]:
    """Top-level packages whose classes the program needs: neurons, surrogates, NamedTuples of the user's structures."""
    kinds: set[type] = {type(part) for info in compiled.source.leaves.values() for part in info.module.modules()}
    graphs = [compiled.source.graph, *(graph for stage in compiled.stages.values() for graph in stage.graphs)]
    kinds |= {n.target.function for graph in graphs for n in all_nodes(graph) if isinstance(n.target, Surrogate)}
    for spec in (compiled.source.in_spec, compiled.source.out_spec):
        kinds |= {type(part) for part in _containers(tree_unflatten([None] * spec.num_leaves, spec))}
    described = [frameworks.encode_leaf(info.module) for info in compiled.source.leaves.values()]
    leaves = frameworks.leaf_packages([*described, *_hooks(compiled.source).values()])
    return iter({kind.__module__.partition(".")[0] for kind in kinds} | leaves | {"torch"})


def _containers(data: Any) -> Iterator[Any]:
    """The NamedTuples in nested data."""
    if isinstance(data, (tuple, list)):
        if hasattr(data, "_fields"):
            yield data
        for item in data:
            yield from _containers(item)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from _containers(item)


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
