"""The text form of graphs: prints, parses back to an equal graph, and never evaluates what it reads.

    print_graph / parse_graph   a SpikeGraph with its header (inputs, tensors, leaves)
    print_fx / parse_fx         the nodes alone, as stage graphs are saved

The grammar is in docs/ir.md.
"""

from __future__ import annotations

from snnpart.text.header import UnboundLeaf, parse_graph, print_graph
from snnpart.text.nodes import parse_fx, print_fx, target_text

__all__ = ["UnboundLeaf", "parse_fx", "parse_graph", "print_fx", "print_graph", "target_text"]
