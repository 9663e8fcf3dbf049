"""Where evaluation and prediction take model and weights from: an exported artifact, or a training checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from snnpart.runtime.checkpoint import read_model
from snnpart.vision import build
from snnpart.vision.artifact import DESCRIBES, load_artifact
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
        config = replace(config, **_left_open(config, artifact.metadata))
        state, place = artifact.state_dict(), str(config.artifact)
    else:
        assert config.checkpoint is not None  # check_source
        state, place = read_model(config.checkpoint), str(config.checkpoint)
    model = build.make_model(config)
    load_weights(model, state, place)
    return config, model


def _left_open(config: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """What the artifact says of the network where the configuration has its default."""
    plain = {name: type(config).__dataclass_fields__[name] for name in DESCRIBES}
    defaults = {n: f.default_factory() if callable(f.default_factory) else f.default for n, f in plain.items()}
    open_fields = [name for name in DESCRIBES if getattr(config, name) == defaults[name]]
    return {name: metadata[name] for name in open_fields if name in metadata}
