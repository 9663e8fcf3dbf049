"""Train, evaluate and predict with any network on images or event frames.

    from snnpart import vision
    vision.train(vision.TrainingConfig(model="sew_resnet18", model_kwargs={"num_classes": 10}, tp=2, pp=2))

The commands `python -m snnpart train|evaluate|predict|export CONFIG.toml` do the same.
"""

from snnpart.vision.config import EvaluationConfig, PredictionConfig, TrainingConfig
from snnpart.vision.evaluate import evaluate
from snnpart.vision.export import Artifact, export, load_artifact
from snnpart.vision.predict import predict
from snnpart.vision.train import train

__all__ = [
    "Artifact", "EvaluationConfig", "PredictionConfig", "TrainingConfig",
    "evaluate", "export", "load_artifact", "predict", "train",
]  # fmt: skip
