"""The stages with their time loops in rounds, as `Plan.fold` says (see `fold_rounds`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from snnpart.passes.rewrite.fold_rounds import in_rounds, regions
from snnpart.plan import Plan
from snnpart.program import StageProgram


def take_rounds(programs: Mapping[tuple[int, int], StageProgram], plan: Plan) -> dict[tuple[int, int], StageProgram]:
    """The programs by (stage, tp rank). A stage that not all of its ranks can run in rounds takes all steps at once.

    Where a rank has a graph of evaluations, all do: one without channels has folded nothing, and must meet the others.
    """
    made = dict(programs)
    for stage in range(plan.stage_count if plan.fold else 0):
        own = [programs[stage, rank] for rank in range(plan.tp)]
        graphs = _of_ranks([program.graph for program in own], plan.fold)
        apart = any(program.evaluation is not None for program in own)
        evaluations = _of_ranks([program.evaluation or program.graph for program in own], plan.fold)
        for rank, program in enumerate(own):
            evaluation = evaluations[rank] if apart else None
            made[stage, rank] = replace(program, graph=graphs[rank], evaluation=evaluation)
    return made


def _of_ranks(graphs: Sequence[fx.Graph], together: int) -> list[fx.Graph]:
    """Each tp rank's graph; ranks that run the same one still do."""
    found = regions(graphs)
    if isinstance(found, str):
        return list(graphs)
    made: dict[int, fx.Graph] = {}
    for graph, own in zip(graphs, found, strict=True):
        if id(graph) not in made:
            made[id(graph)] = in_rounds(graph, own, together)
    return [made[id(graph)] for graph in graphs]
