"""What a plan says of kernels and memory layout, done to the graphs of the stages, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from snnpart.costs import MachineProfile
from snnpart.graph import LeafInfo
from snnpart.passes.rewrite.channels_last import channels_last
from snnpart.passes.rewrite.fuse_neurons import fuse_neurons
from snnpart.plan import Plan


@dataclass
class Kernels:
    """Why neurons stay layers, and the weights that are to lie with their channels last, of all stages so far."""

    plan: Plan
    leaves: Mapping[str, LeafInfo]
    profile: MachineProfile
    stays: tuple[str, ...] = ()
    weights: frozenset[str] = frozenset()

    def prepare(self, graphs: Sequence[fx.Graph]) -> None:
        """Fuse neurons and lay images out as the plan says."""
        for graph in graphs:
            if self.plan.fuse:
                found = fuse_neurons(graph, self.leaves, self.profile, state=self.plan.neuron_dtype)
                self.stays = tuple(dict.fromkeys((*self.stays, *found)))
            if self.plan.channels_last:
                weights = channels_last(graph)
                self.weights |= weights if self.plan.dp != "fsdp2" else frozenset()
