"""Checkpoints of training state that fit any topology."""

from snnpart.runtime.checkpoint.checkpointer import Checkpointer, last_whole, read_model
from snnpart.runtime.checkpoint.randomness import undisturbed

__all__ = ["Checkpointer", "last_whole", "read_model", "undisturbed"]
