"""The artifact: a trained network as data, for any topology and for the user's plain module.

    DIR/artifact.json         how the network is made (factory and keywords), time, layout, versions, checksums
        model.safetensors     full tensors under the names of the module's state_dict

No pickle, and reading it runs no code: the factory's name is text until the user evaluates with it. What was cut short
or changed is refused: artifact.json carries its own checksum, and that of the weights and of every tensor in them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from snnpart import __version__
from snnpart.errors import CheckpointError
from snnpart.runtime.checkpoint import folder
from snnpart.runtime.running import RunningProgram

FORMAT, VERSION = "snnpart artifact", 1
HEAD, WEIGHTS = "artifact.json", "model.safetensors"
DESCRIBES = ("model", "model_kwargs", "input_layout", "time_steps", "readout", "dataset", "dataset_kwargs")


@dataclass(frozen=True)
class Artifact:
    """An artifact that was read and found whole."""

    directory: Path
    metadata: dict[str, Any]

    def state_dict(self) -> dict[str, Tensor]:
        """The weights, for the plain module's `load_state_dict`."""
        with safe_open(self.directory / WEIGHTS, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict

    def load_into(self, model: nn.Module) -> nn.Module:
        """Put the weights into the module; CheckpointError where they are another network's."""
        try:
            model.load_state_dict(self.state_dict())
        except RuntimeError as error:
            raise CheckpointError(f"the weights do not fit: {error}", where=str(self.directory)) from error
        return model


def export(running: RunningProgram, directory: Path, description: Mapping[str, Any]) -> Path:
    """Write the artifact of a running program. Collective; on every rank the folder is there when this returns.

    Args:
        directory: replaced if it holds an artifact.
        description: the fields of the training configuration; those that describe the network are kept.

    Raises:
        CheckpointError: the directory holds something else, or the disk is full; what was there before is untouched.
    """
    state = running.state_dict()
    problem: Exception | None = None
    if running.ranks.rank == 0:
        try:
            write(directory, state, description, running.compiled.plan.to_json())
        except Exception as error:
            problem = error
    running.ranks.agree(problem)
    return directory


def write(directory: Path, state: Mapping[str, Tensor], description: Mapping[str, Any], plan: str = "") -> None:
    """Write an artifact from full tensors, in this process."""
    target = Path(directory).absolute()
    problem = unusable(target)
    if problem is not None:
        raise problem
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _fill(partial, state, description, plan)
        _put(partial, target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the artifact was not written: {error.strerror or error}", where=str(target), fix="make room on the disk"
        ) from error


def unusable(directory: Path) -> CheckpointError | None:
    """Why no artifact can take this place; None where it can."""
    if not directory.exists() or (directory.is_dir() and ((directory / HEAD).exists() or not any(directory.iterdir()))):
        return None
    return CheckpointError(f"{directory.absolute()} exists and is not an artifact", fix="give a new or empty folder")


def _fill(partial: Path, state: Mapping[str, Tensor], description: Mapping[str, Any], plan: str) -> None:
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
    try:
        save_file(tensors, partial / WEIGHTS)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with (partial / WEIGHTS).open("rb") as file:
        os.fsync(file.fileno())
    head = {
        "format": FORMAT,
        "version": VERSION,
        **{name: description[name] for name in DESCRIBES if name in description},
        "plan": json.loads(plan) if plan else None,
        "versions": {"snnpart": __version__, "torch": str(torch.__version__)},
        "tensors": {name: {"shape": list(t.shape), "dtype": str(t.dtype)} for name, t in tensors.items()},
        "files": {WEIGHTS: folder.checksum(partial / WEIGHTS)},
    }
    folder.write_signed(partial / HEAD, head)


def _put(partial: Path, target: Path) -> None:
    """The new folder in the place of the old one, which goes last."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    folder.flush_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_artifact(directory: Path | str) -> Artifact:
    """Read and check an artifact.

    Raises:
        CheckpointError: a file is missing, cut short or changed, or it is of another kind.
    """
    path = Path(directory)
    head = folder.read_signed(path / HEAD)
    if head.get("format") != FORMAT or head.get("version") != VERSION:
        raise CheckpointError(
            f"{HEAD} is of format {head.get('format')!r} version {head.get('version')!r}, not {FORMAT!r} {VERSION}",
            where=str(path),
        )
    folder.check_files(path, head)
    return Artifact(path, head)
