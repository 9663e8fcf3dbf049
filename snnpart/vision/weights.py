"""Where evaluation and prediction take model and weights from: an exported artifact, or a training checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from snnpart.errors import ConfigError
from snnpart.runtime.checkpoint import read_model
from snnpart.vision import build
from snnpart.vision.artifact import DESCRIBES, Artifact, load_artifact
from snnpart.vision.config import EvaluationConfig, PredictionConfig
from snnpart.vision.session import load_weights

C = TypeVar("C", EvaluationConfig, PredictionConfig)


def weights_of(config: C) -> tuple[C, nn.Module]:
    """The configuration, with what the artifact says of the network, and the network with its weights.

    Fields that the user set win over the artifact's.

    Raises:
        CheckpointError: the artifact or checkpoint is damaged. ConfigError: it holds another network's weights.
    """
    if config.artifact is not None:
        artifact = load_artifact(config.artifact)
        config = replace(config, **_left_open(config, artifact))
        state, place = artifact.state_dict(), str(config.artifact)
    else:
        assert config.checkpoint is not None  # check_source
        state, place = _of_checkpoint(config.checkpoint, config.weights), str(config.checkpoint)
    model = build.make_model(config)
    load_weights(model, state, place)
    return config, model


def _of_checkpoint(path: Path, weights: str | None) -> dict[str, Tensor]:
    """The network's tensors; parameters as their exponential average where that is wanted, buffers as they are."""
    raw = read_model(path)
    average = read_model(path, "ema") if weights != "raw" else {}
    if weights == "average" and not average:
        raise ConfigError(
            "the checkpoint holds no average of the weights",
            where=str(path),
            fix='train with ema, or set weights = "raw"',
        )
    return {**raw, **average}


def _left_open(config: Any, artifact: Artifact) -> dict[str, Any]:
    """What the artifact says of the network where the configuration has its default; ConfigError where it must say
    more: None stands for what was an object in Python when it was trained."""
    metadata = artifact.metadata
    plain = {name: type(config).__dataclass_fields__[name] for name in DESCRIBES}
    defaults = {n: f.default_factory() if callable(f.default_factory) else f.default for n, f in plain.items()}
    open_fields = [name for name in DESCRIBES if getattr(config, name) == defaults[name]]
    for name in ("model", "dataset"):
        if name in open_fields and metadata.get(name, "") is None:
            raise ConfigError(
                f"the artifact does not say its {name}, which was given as an object of Python",
                where=str(artifact.directory),
                fix=f"give {name}",
            )
    return {name: metadata[name] for name in open_fields if name in metadata}
