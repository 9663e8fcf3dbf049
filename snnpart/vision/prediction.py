"""Prediction: the logits of every sample in one HDF5 file, in the order of the data, without fillers.

Each dp rank writes the samples it answered into a part file of its own, step by step; rank 0 merges the parts at the
end and renames the result into its place. So no file is written by two processes, an interrupted run goes on with the
samples that no part holds, on any number of ranks, and the output is whole or not there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset

from snnpart import __version__
from snnpart.errors import ConfigError
from snnpart.vision import build
from snnpart.vision.config import PredictionConfig
from snnpart.vision.evaluation import wide
from snnpart.vision.logs import Log, Steps
from snnpart.vision.session import Session, opened
from snnpart.vision.weights import weights_of

INDEX, LOGITS, TARGET = "index", "logits", "target"
_IDENTITY = "run"


def predict(config: PredictionConfig) -> Path:
    """Write `config.output`; collective.

    Raises:
        ConfigError: the folder does not exist, or part files of another run lie there.
    """
    config, model = weights_of(config)
    weights = _weights_checksum(model)
    if not config.output.parent.is_dir():
        raise ConfigError(f"{config.output.parent} is not a folder", fix="make it, or give another output")
    if config.output.is_dir():
        raise ConfigError(f"{config.output} is a folder", fix="give the name of an HDF5 file")
    data = _part(build.make_data(config), config.split)
    with opened(config, data, config.split, model, targets=config.targets) as session:
        ranks = session.running.ranks
        parts = _Parts(config, _identity(config, weights))
        problem = None
        try:
            done = parts.done() if config.resume else set()
            if not config.resume and ranks.rank == 0:
                parts.clear()
        except ConfigError as error:
            problem, done = error, set()
        ranks.agree(problem)
        rest = [index for index in range(len(data)) if index not in done]
        if rest:
            _run(session, data, rest, parts)
        ranks.agree(None)
        ranks.agree(_merged(parts, session, len(data)) if ranks.rank == 0 else None)
        Log(None, ranks.rank == 0).metrics({"event": "prediction", "samples": len(data), "output": str(config.output)})
    return config.output


def _part(data: Any, split: str) -> Any:
    if split == "all":
        return ConcatDataset([data.training, data.validation])
    return data.training if split == "train" else data.validation


def _merged(parts: _Parts, session: Session, samples: int) -> Exception | None:
    """Write the output from the parts; what went wrong, for all ranks to raise."""
    try:
        parts.merge(session, samples)
    except (ConfigError, OSError) as error:
        return error
    return None


def _run(session: Session, data: Any, rest: list[int], parts: _Parts) -> None:
    """Answer the samples of `rest`; this dp rank's into its part file."""
    config = parts.config
    loader = session.loader(session.samples(data, targets=config.targets, chosen=rest))
    writer = parts.writer(session) if session.reports else None
    try:
        with Steps("prediction", len(loader), session.running.ranks.rank == 0) as steps:
            for batch in session.batches(loader):
                logits = session.logits(session.running.eval_step(batch.inputs)).cpu()
                if config.targets and not isinstance(batch.targets, Tensor):
                    raise ConfigError("targets that are no single tensor cannot be written", fix="set targets = false")
                if writer is not None and batch.real:
                    index = torch.tensor(batch.indices)
                    writer.append(index[batch.counted], logits[batch.counted], batch.targets[batch.counted])
                steps.advance()
    finally:
        if writer is not None:
            writer.close()


class _Parts:
    """The part files of one prediction, beside its output."""

    def __init__(self, config: PredictionConfig, identity: str) -> None:
        self.config, self._identity = config, identity

    def _files(self) -> list[Path]:
        return sorted(self.config.output.parent.glob(f".{self.config.output.name}.part-*.h5"))

    def clear(self) -> None:
        for path in self._files():
            path.unlink()

    def done(self) -> set[int]:
        """The samples that part files hold; ConfigError for part files of another run."""
        found: set[int] = set()
        for path in self._files():
            for index, _, _ in self._read(path):
                found.update(index.tolist())
        return found

    def writer(self, session: Session) -> _Writer:
        """A new part file of this rank."""
        taken = len(self._files())
        name = f".{self.config.output.name}.part-{taken:04d}-{session.running.ranks.rank:04d}-{os.getpid()}.h5"
        return _Writer(self.config.output.parent / name, self._identity, self.config.targets)

    def merge(self, session: Session, samples: int) -> None:
        """All parts in order of index, as one file; then the parts go."""
        rows = [row for path in self._files() for row in self._read(path)]
        index = np.concatenate([row[0] for row in rows])
        order, first = np.unique(index, return_index=True)
        if len(order) != samples:
            raise ConfigError(f"{len(order)} of {samples} samples were answered", fix="run the prediction again")
        scratch = self.config.output.with_name(f".{self.config.output.name}.new")
        with h5py.File(scratch, "w") as file:
            file[INDEX], file[LOGITS] = order, np.concatenate([row[1] for row in rows])[first]
            if self.config.targets:
                file[TARGET] = np.concatenate([row[2] for row in rows])[first]
            file.attrs.update(_attributes(self.config, session))
        os.replace(scratch, self.config.output)
        self.clear()

    def _read(self, path: Path) -> Iterator[tuple[Any, Any, Any]]:
        try:
            with h5py.File(path, "r") as file:
                if file.attrs.get(_IDENTITY) != self._identity:
                    raise ConfigError(
                        f"{path} belongs to another prediction (other weights, data or split)",
                        fix="set resume = false, or give another output",
                    )
                length = int(file.attrs["rows"])
                target = file[TARGET][:length] if TARGET in file else None
                if length:
                    yield file[INDEX][:length], file[LOGITS][:length], target
        except (OSError, KeyError):  # a part whose writer was killed before it wrote a row
            return


class _Writer:
    """Rows appended to one part file; `rows` counts those that are whole, and is written after them."""

    def __init__(self, path: Path, identity: str, targets: bool) -> None:
        self._file, self._targets = h5py.File(path, "w"), targets
        self._file.attrs.update({_IDENTITY: identity, "rows": 0})
        self._file.flush()

    def append(self, index: Tensor, logits: Tensor, targets: Tensor) -> None:
        rows = {INDEX: index, LOGITS: wide(logits), **({TARGET: targets} if self._targets else {})}
        for name, values in rows.items():
            self._extend(name, values.numpy())
        self._file.flush()
        self._file.attrs["rows"] = len(self._file[INDEX])
        self._file.flush()

    def _extend(self, name: str, values: np.ndarray[Any, Any]) -> None:
        if name not in self._file:
            self._file.create_dataset(name, data=values, maxshape=(None, *values.shape[1:]), chunks=True)
            return
        before = len(self._file[name])
        self._file[name].resize(before + len(values), axis=0)
        self._file[name][before:] = values

    def close(self) -> None:
        self._file.close()


def _weights_checksum(model: nn.Module) -> str:
    """SHA-256 of the model's state: a folder of the same name may hold other weights by now."""
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _identity(config: PredictionConfig, weights: str) -> str:
    """What makes two predictions the same: weights, data, split, layout."""
    data = config.described()
    kept = ("model", "model_kwargs", "dataset", "dataset_kwargs", "input_layout", "time_steps", "readout", "split",
            "targets")  # fmt: skip
    told = {"weights": weights, **{name: data[name] for name in kept}}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _attributes(config: PredictionConfig, session: Session) -> dict[str, str]:
    return {
        "config": json.dumps(config.described()),
        "plan": session.running.compiled.plan.to_json(),
        "model": session.running.compiled.source.name,
        "snnpart": __version__,
        "torch": str(torch.__version__),
    }
