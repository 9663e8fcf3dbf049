"""Decisions: which layers are sharded over tp, and which pipeline stage runs what."""

from snnpart.passes.decide.plan import decide

__all__ = ["decide"]
