"""Lowering: one program per rank from a graph and a plan."""

from snnpart.passes.lower.rank_program import lower

__all__ = ["lower"]
