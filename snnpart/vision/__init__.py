"""Train, evaluate and predict with any network on images or event frames.

    from snnpart import vision
    vision.train(vision.TrainingConfig(model="sew_resnet18", model_kwargs={"num_classes": 10}, tp=2, pp=2))

The commands `python -m snnpart train|evaluate|predict|export CONFIG.toml` do the same.
"""

from snnpart.vision.artifact import Artifact, export, load_artifact
from snnpart.vision.config import EvaluationConfig, PredictionConfig, TrainingConfig
from snnpart.vision.evaluation import evaluate
from snnpart.vision.prediction import predict
from snnpart.vision.training import train

__all__ = [
    "Artifact", "EvaluationConfig", "PredictionConfig", "TrainingConfig",
    "evaluate", "export", "load_artifact", "predict", "train",
]  # fmt: skip
