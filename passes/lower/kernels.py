"""What a plan says of kernels and memory layout, done to the graphs of the stages, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from snnpart.costs import MachineProfile
from snnpart.graph import LeafInfo, SpikeGraph, copied
from snnpart.passes.rewrite.channels_last import Copies, channels_last, copies_of
from snnpart.passes.rewrite.fold_norms import fold_norms
from snnpart.passes.rewrite.fuse_neurons import fuse_neurons
from snnpart.passes.rewrite.pack_saved import pack_saved
from snnpart.passes.rewrite.pool_codes import pool_codes
from snnpart.plan import Plan


def copies_for(graph: SpikeGraph, plan: Plan, profile: MachineProfile) -> Copies:
    """What changes of layout take with and without channels last in a network that is planned so, on one rank."""
    own = graph.copy()
    if plan.fuse:
        fuse_neurons(own.graph, own.leaves, profile)
    return copies_of(own.graph, profile)


@dataclass
class Kernels:
    """Why neurons stay layers and norms stay norms, the norms that evaluations do without, and the weights that are to
    lie with their channels last, of all stages so far."""

    plan: Plan
    leaves: Mapping[str, LeafInfo]
    profile: MachineProfile
    stays: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    weights: frozenset[str] = frozenset()

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know of it."""
        if self.plan.numerics != "fold":
            return self.stays
        gone = ", ".join(self.folded) or "none"
        return (*self.stays, f"{len(self.folded)} norms are part of the layer before them in eval: {gone}")

    @property
    def _way(self) -> str:
        """How fused neurons run on a GPU. What one rank measures is its own affair only where no other rank must have
        the same numbers (tp) or takes part in what is measured (shared statistics)."""
        apart = self.plan.tp == 1 and self.plan.batchnorm != "sync"
        return "measured" if self.plan.fuse == "auto" and apart else "kernel"

    def prepare(self, ranks: Sequence[Sequence[fx.Graph]]) -> list[tuple[fx.Graph | None, ...]]:
        """Fuse neurons, lay images out, and have places and spikes kept as bits, as the plan says, in place.

        Args:
            ranks: the stages' graphs of each tp rank; ranks with the same ones are there once.

        Returns:
            each rank's graphs of evaluations, where they are others than those of training.
        """
        graphs = [graph for own in ranks for graph in own]
        for graph in graphs if self.plan.fuse else ():
            state = self.plan.neuron_dtype
            found = fuse_neurons(graph, self.leaves, self.profile, state=state, way=self._way)
            self.stays = tuple(dict.fromkeys((*self.stays, *found)))
        evaluations = [tuple(self._for_evaluation(graph) for graph in own) for own in ranks]
        if self.plan.channels_last:
            for training, others in zip(zip(*ranks, strict=True), zip(*evaluations, strict=True), strict=True):
                self._lay_out(training, others)
        for graph in graphs if self.plan.saved == "packed" else ():
            pack_saved(graph)
        return evaluations

    def _lay_out(self, training: Sequence[fx.Graph], evaluations: Sequence[fx.Graph | None]) -> None:
        """One stage's graphs over its ranks. Nothing is done where only some have one of their own for evaluations:
        they run it together with the others' graphs of training."""
        own = [graph for graph in evaluations if graph is not None]
        for graphs in (training, own) if len(own) in (0, len(training)) else ():
            self.weights |= channels_last(graphs, self.profile)
            for graph in graphs:
                pool_codes(graph)

    def _for_evaluation(self, graph: fx.Graph) -> fx.Graph | None:
        if self.plan.numerics != "fold":
            return None
        own = copied(graph)
        found = fold_norms(own)
        self.folded = tuple(dict.fromkeys((*self.folded, *found.gone)))
        self.stays = tuple(dict.fromkeys((*self.stays, *found.stays)))
        return own if found.gone else None
