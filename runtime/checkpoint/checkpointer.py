"""Checkpointer: saves a running program while it goes on, and puts it back on any topology.

Saving has two halves. On the caller's thread the rank's numbers are copied to the CPU; a thread then writes them with
torch.distributed.checkpoint, over process groups of its own so that nothing of it meets the program's communication.
Rank 0 renames the folder into place after all ranks wrote and flushed theirs. One save is under way at a time.

Loading verifies every checksum first, reads into tensors beside the program, and copies into the program only after
every rank has all of it.
"""

from __future__ import annotations

import logging
import shutil
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from snnpart.errors import CheckpointError, SnnpartError
from snnpart.runtime.checkpoint import folder, plain
from snnpart.runtime.checkpoint.chunks import Chunk, Chunked, check_all_tiles
from snnpart.runtime.checkpoint.contents import MODEL, Contents, Entry, Mirrors, prepare_optimizer
from snnpart.runtime.checkpoint.randomness import put_back, taken
from snnpart.runtime.running import RunningProgram

_log = logging.getLogger("snnpart")


class Checkpointer:
    """Checkpoints of one running program in one folder. Every method is collective.

    Args:
        directory: made if it is not there; what a killed writer left in it is removed.
        keep_last: how many checkpoints stay.
        mirrors: tensors laid out as the parameters, under their names, to save with them.
    """

    def __init__(
        self, directory: Path, running: RunningProgram, *, keep_last: int = 3, mirrors: Mirrors | None = None
    ) -> None:
        self.directory, self._running, self._keep = Path(directory), running, keep_last
        self._contents = Contents(running, mirrors or {})
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._group = _new_group() if running.ranks.world.group is not None else None
        self._on_rank_0(self._make_folder)

    def _make_folder(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        folder.sweep(self.directory)

    def save(self, step: int, extra: Mapping[str, Any]) -> Path:
        """Begin to save; returns where the checkpoint will lie. An earlier save is finished first.

        Args:
            step: the optimizer step, which names the checkpoint.
            extra: small state of the caller, of numbers, text, lists, dicts and tensors.

        Raises:
            CheckpointError: an earlier save failed (disk full), or this one's content cannot be saved.
        """
        self.wait()
        self._running.settle()
        problem: SnnpartError | None = None
        entries: list[Entry] = []
        try:
            entries = [entry for entry in self._contents.entries() if entry.writes]
            head = {"step": step, "extra": plain.encode(extra), "optimizer": self._groups()}
        except SnnpartError as error:
            problem, head = error, {}
        self._running.ranks.agree(problem)
        held = {entry.name: (entry.shape, [chunk.box for chunk in entry.chunks]) for entry in entries}
        check_all_tiles(self._running.ranks.gather(held))
        state = {entry.name: entry.chunked(copy=True) for entry in entries}
        head["random"] = plain.encode(self._running.ranks.gather(taken(self._running)))
        head["world"] = self._running.ranks.mesh.size
        scale = self._running.loss_scale
        head["loss_scale"] = None if scale is None else scale.state_dict()
        self._start(step, state, head)
        return folder.place_of(self.directory, step)

    def _groups(self) -> Any:
        """The optimizer's hyperparameters, equal on all ranks that have one."""
        optimizer = self._running.optimizer
        groups = (
            [] if optimizer is None else [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        )
        mine = plain.encode(groups, "optimizer.param_groups")
        return next((found for found in self._running.ranks.gather(mine) if found), [])

    def _start(self, step: int, state: dict[str, Any], head: dict[str, Any]) -> None:
        def write() -> None:
            try:
                self._write(step, state, head)
            except Exception as error:
                self._failure = error

        self._writing = threading.Thread(target=write, name="snnpart-checkpoint", daemon=False)
        self._writing.start()

    def _write(self, step: int, state: dict[str, Any], head: dict[str, Any]) -> None:
        """In the thread: all ranks write into the partial folder, rank 0 puts it in place."""
        partial, first = folder.partial_of(self.directory, step), self._running.ranks.rank == 0
        problem: Exception | None = None
        try:
            if first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
        except OSError as error:
            problem = error
        self._agree(problem)
        writer = FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
        try:
            with _alone():
                dcp.save(state, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        except BaseException as error:
            problem = error if isinstance(error, Exception) else RuntimeError(str(error))
        mine: dict[str, str] = {}
        if problem is None:
            rank = self._running.ranks.rank
            mine = {p.name: folder.checksum(p) for p in partial.iterdir() if p.name.startswith(f"__{rank}_")}
        self._agree(problem, partial)
        everyone = self._gather(mine)
        try:
            if first:
                self._finish(partial, step, head, everyone)
        except OSError as error:
            problem = error
        self._agree(problem, partial)

    def _finish(self, partial: Path, step: int, head: dict[str, Any], sums: list[dict[str, str]]) -> None:
        """Rank 0: the head, the rename, and the end of checkpoints that are too old."""
        merged = {name: value for each in sums for name, value in each.items()}
        merged[".metadata"] = folder.checksum(partial / ".metadata")
        place = folder.place_of(self.directory, step)
        folder.commit(partial, place, head, merged)
        folder.keep_last(self.directory, self._keep)
        _log.info("checkpoint saved: %s", place)

    def _gather(self, thing: Any) -> list[Any]:
        if self._group is None:
            return [thing]
        everyone: list[Any] = [None] * self._running.ranks.mesh.size
        dist.all_gather_object(everyone, thing, group=self._group)
        return everyone

    def _agree(self, problem: Exception | None, partial: Path | None = None) -> None:
        """In the thread: raise on every rank what one of them met; rank 0 removes the partial folder then."""
        texts = [text for text in self._gather(None if problem is None else _told(problem)) if text]
        if not texts:
            return
        if partial is not None and self._running.ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint was not saved: {texts[0]}",
            where=str(self.directory),
            fix="make room or give another checkpoint_dir; checkpoints that were saved before are whole",
        )

    def wait(self) -> None:
        """Until nothing is being written; CheckpointError on every rank when the last save failed."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        failure, self._failure = self._failure, None
        self._running.ranks.agree(failure)

    def close(self) -> None:
        """Let a save that is under way finish, without raising."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            _log.error("%s", self._failure)

    def latest(self) -> Path | None:
        """The last checkpoint that is whole; damaged ones are named in the log and passed over."""
        return self._on_rank_0(lambda: last_whole(self.directory))

    def load(self, path: Path) -> dict[str, Any]:
        """Put model, optimizer, mirrors and generators back; returns the caller's `extra`.

        Raises:
            CheckpointError: the checkpoint is damaged or of another network. Nothing is changed then.
        """
        self.wait()
        head = self._on_rank_0(lambda: _verified(path))
        problem: Exception | None = None
        staged: dict[str, Chunked] = {}
        try:
            stored = stored_shapes(path)
            prepare_optimizer(self._running, stored)
            entries = list(self._contents.entries())
            _check_names(entries, stored, path)
            staged = {entry.name: _staging(entry) for entry in entries}
            _read(staged, path)
        except Exception as error:
            problem = error if isinstance(error, SnnpartError) else CheckpointError(str(error), where=str(path))
        self._running.ranks.agree(problem)
        for entry in entries:
            for target, read in zip(entry.chunks, staged[entry.name].chunks, strict=True):
                target.data.copy_(read.data)
        self._restore_groups(plain.decode(head["optimizer"]))
        if self._running.loss_scale is not None and head["loss_scale"] is not None:
            self._running.loss_scale.load_state_dict(head["loss_scale"])
        put_back(self._running, plain.decode(head["random"]), head["world"], head["step"])
        found: dict[str, Any] = plain.decode(head["extra"])
        return found

    def _restore_groups(self, groups: list[dict[str, Any]]) -> None:
        optimizer = self._running.optimizer
        if optimizer is None:
            return
        for group, saved in zip(optimizer.param_groups, groups, strict=False):
            for key, value in saved.items():
                held = group.get(key)
                if isinstance(held, torch.Tensor):
                    held.fill_(float(value))
                else:
                    group[key] = value

    def _on_rank_0(self, function: Any) -> Any:
        """The function's result on rank 0, on every rank; what it raises, too."""
        ranks, result = self._running.ranks, None
        problem: Exception | None = None
        if ranks.rank == 0:
            try:
                result = function()
            except OSError as error:
                problem = CheckpointError(f"{error.strerror}", where=str(error.filename or self.directory))
            except Exception as error:
                problem = error
        ranks.agree(problem)
        return ranks.gather(result)[0]


def last_whole(directory: Path) -> Path | None:
    """The last checkpoint of a folder whose checksums are right."""
    for path in folder.found(directory):
        try:
            _verified(path)
            return path
        except CheckpointError as error:
            _log.warning("%s is passed over: %s", path, error)
    return None


def _verified(path: Path) -> dict[str, Any]:
    head = folder.read_head(path)
    folder.check_files(path, head)
    return head


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a checkpoint."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: tuple(item.size) for name, item in metadata.items() if isinstance(item, TensorStorageMetadata)}


def _check_names(entries: list[Entry], stored: Mapping[str, tuple[int, ...]], path: Path) -> None:
    for entry in entries:
        if entry.name not in stored:
            raise CheckpointError(f"it holds no '{entry.name}'", where=str(path), fix="load it with the same network")
        if stored[entry.name] != entry.shape:
            raise CheckpointError(
                f"'{entry.name}' has shape {stored[entry.name]} there and {entry.shape} in the network", where=str(path)
            )


def _staging(entry: Entry) -> Chunked:
    chunks = [Chunk(chunk.offsets, torch.empty(chunk.data.shape, dtype=entry.dtype)) for chunk in entry.chunks]
    return Chunked(entry.shape, entry.dtype, chunks)


def _read(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Fill the tensors from the files, by this process alone."""
    with _alone():
        dcp.load(dict(tensors), storage_reader=FileSystemReader(path), no_dist=True)


@contextmanager
def _alone() -> Iterator[None]:
    """A block in which torch does not warn that a single process reads or writes: that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def read_model(path: Path, mirror: str = MODEL) -> dict[str, torch.Tensor]:
    """The network's full tensors in a checkpoint, under the user's names, read by this process alone.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    _verified(path)
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    prefix = f"{mirror}."
    full = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in metadata.items()
        if name.startswith(prefix) and isinstance(item, TensorStorageMetadata)
    }
    _read(full, path)
    return {name.removeprefix(prefix): tensor for name, tensor in full.items()}


def _new_group() -> dist.ProcessGroup | None:
    group = dist.new_group(backend="gloo")
    return group if isinstance(group, dist.ProcessGroup) else None


def _told(error: BaseException) -> str:
    """The innermost cause, which says what the disk said."""
    causes = getattr(error, "failures", None)
    if isinstance(causes, Mapping) and causes:
        first = next(iter(causes.values()))
        return _told(first[0] if isinstance(first, tuple) else first)
    return f"{type(error).__name__}: {error}"
