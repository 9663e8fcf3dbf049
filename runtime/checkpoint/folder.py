"""Checkpoints on disk: whole or not there.

    DIR/step-00000120/checkpoint.json     what it is, its extra state, and the checksum of every other file
                      .metadata           torch.distributed.checkpoint's
                      __0_0.distcp ...    each rank's chunks

A checkpoint is written into a folder beside its place and renamed into it, after every file was flushed to the disk
and its checksum taken; a writer that is killed leaves a folder that nobody reads, and the one before stays valid.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snnpart.errors import CheckpointError

FORMAT, VERSION = "snnpart checkpoint", 1
HEAD = "checkpoint.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.step-\d{8,}\.partial")


def place_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def partial_of(root: Path, step: int) -> Path:
    return root / f".step-{step:08d}.partial"


def found(root: Path) -> list[Path]:
    """The checkpoints of a folder, the last one first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=_step, reverse=True)


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def sweep(root: Path) -> None:
    """Remove what killed writers left."""
    for path in root.iterdir() if root.is_dir() else ():
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def keep_last(root: Path, count: int) -> None:
    """Remove all but the last `count` checkpoints."""
    for path in found(root)[count:]:
        shutil.rmtree(path, ignore_errors=True)


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit(partial: Path, place: Path, head: Mapping[str, Any], checksums: Mapping[str, str]) -> None:
    """Write the head, and rename the folder into its place; both are on the disk when this returns."""
    whole = {"format": FORMAT, "version": VERSION, **head, "files": dict(sorted(checksums.items()))}
    write_signed(partial / HEAD, whole)
    flush_folder(partial)
    if place.exists():  # the same step again, after a resumed run
        shutil.rmtree(place)
    os.rename(partial, place)
    flush_folder(place.parent)


def flush_folder(path: Path) -> None:
    """Put the folder's entries on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_signed(path: Path, head: Mapping[str, Any]) -> None:
    """A JSON file with its own checksum, flushed to the disk."""
    body = json.dumps({"sha256": _signature(head), "head": head}, indent=1)
    with path.open("w", encoding="utf-8") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def read_signed(path: Path) -> dict[str, Any]:
    """What `write_signed` wrote; CheckpointError where a byte of it was changed."""
    try:
        body = path.read_text(encoding="utf-8")
        data = json.loads(body)
        head: dict[str, Any] = data["head"]
        right = _signature(head) == data["sha256"] and body == json.dumps(data, indent=1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}", where=str(path.parent), fix=_EARLIER) from error
    if not right:
        raise CheckpointError(f"{path.name} is damaged: its checksum differs", where=str(path.parent), fix=_EARLIER)
    return head


def _signature(head: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(head, indent=1).encode()).hexdigest()


def read_head(path: Path) -> dict[str, Any]:
    """The head of a checkpoint; CheckpointError where it is damaged, of another kind, or a folder of checkpoints."""
    if not (path / HEAD).exists() and found(path):
        raise CheckpointError(
            "this folder holds checkpoints and is none", where=str(path), choices=[each.name for each in found(path)]
        )
    head = read_signed(path / HEAD)
    if head.get("format") != FORMAT or head.get("version") != VERSION:
        raise CheckpointError(
            f"{HEAD} is of format {head.get('format')!r} version {head.get('version')!r}, not {FORMAT!r} {VERSION}",
            where=str(path),
        )
    return head


def check_files(path: Path, head: Mapping[str, Any]) -> None:
    """CheckpointError names the first file that is missing or damaged."""
    for name, right in head["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{name} is missing", where=str(path), fix=_EARLIER)
        if checksum(file) != right:
            raise CheckpointError(f"{name} is damaged: its checksum differs", where=str(path), fix=_EARLIER)


_EARLIER = "take an earlier one that is whole"
