"""Cuts a graph with `Stage` facts into one graph per stage.

A value made in stage p and last used in stage q crosses every boundary p..q-1: the stages between receive it and send
it on. It is one port however many users it has. Nodes that are everywhere (program inputs, constants, sizes, and what
follows from these) and tuples that only wrap values are copied into each stage that uses them. Ports stand in the
order of the source graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from snnpart import facts
from snnpart.bits import states_of
from snnpart.errors import PlanError
from snnpart.facts import Cost, Domain, Stage, Value
from snnpart.graph import BATCH_SIZE, TRAINING, output_node
from snnpart.ops_time import leaf_paths
from snnpart.passes.decide.parts import everywhere, is_bundle
from snnpart.program import Port


@dataclass(frozen=True)
class StageGraph:
    """The graph of one stage in the form that `snnpart.program` describes, and the names it reads."""

    graph: fx.Graph
    reads: tuple[str, ...]
    receives: tuple[Port, ...]
    sends: tuple[Port, ...]
    tensors: tuple[str, ...]
    leaves: tuple[str, ...]
    keeps: tuple[int, ...] = ()


def cut_stages(graph: fx.Graph, count: int, kept: int = 0) -> tuple[StageGraph, ...]:
    """The stage graphs 0..count-1 of a graph whose nodes have `Stage` facts; its last `kept` outputs stay where they
    are made.

    Raises:
        PlanError: a node needs a value from a later stage, or a value that is no tensor would have to be sent.
    """
    stage_of = _stages(graph)
    answers, stays = _results(graph, stage_of, kept)
    last_use = _last_use(graph, stage_of, count, answers)
    crossing = tuple(
        tuple(node for node, last in last_use.items() if stage_of[node] <= boundary < last)
        for boundary in range(count - 1)
    )
    for node in dict.fromkeys(node for nodes in crossing for node in nodes):
        _check_sendable(node)
    return tuple(
        _build(
            graph,
            stage,
            stage_of,
            crossing[stage - 1] if stage else (),
            crossing[stage] if stage < count - 1 else None,
            answers,
            stays.get(stage, {}),
        )
        for stage in range(count)
    )


def _results(
    graph: fx.Graph, stage_of: Mapping[fx.Node, int], kept: int
) -> tuple[tuple[Any, ...], dict[int, dict[int, fx.Node]]]:
    """What the last stage returns, and what each stage keeps, by its number among the kept outputs."""
    every: tuple[Any, ...] = tuple(output_node(graph).args[0])  # type: ignore[arg-type]
    stays: dict[int, dict[int, fx.Node]] = {}
    for number, node in enumerate(every[len(every) - kept :]):
        stays.setdefault(_home(node, stage_of), {})[number] = node
    return every[: len(every) - kept], stays


def _stages(graph: fx.Graph) -> dict[fx.Node, int]:
    """The stage of each node that lies in one."""
    copied = everywhere(graph)
    return {
        node: facts.need(node, Stage).index
        for node in graph.nodes
        if node.op != "output" and node not in copied and not is_bundle(node)
    }


def _home(node: fx.Node, stage_of: Mapping[fx.Node, int]) -> int:
    """The stage that keeps a value; of one that all stages can compute the first that does."""
    stage = facts.get(node, Stage)
    return stage_of.get(node, stage.index if stage is not None else 0)


def _last_use(
    graph: fx.Graph, stage_of: Mapping[fx.Node, int], count: int, answers: tuple[Any, ...]
) -> dict[fx.Node, int]:
    """The last stage that uses each node, in graph order."""
    last: dict[fx.Node, int] = dict(stage_of)
    needed: dict[fx.Node, int] = {output_node(graph): count - 1}
    for node in reversed(graph.nodes):
        at = stage_of.get(node, needed.get(node))
        if at is None:
            continue
        for source in node.all_input_nodes if node.op != "output" else _nodes(answers):
            if source in stage_of:
                if stage_of[source] > at:
                    _refuse(node, at, source, stage_of[source])
                last[source] = max(last[source], at)
            else:
                needed[source] = max(needed.get(source, 0), at)
    return last


def _nodes(values: tuple[Any, ...]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _refuse(node: fx.Node, at: int, source: fx.Node, later: int) -> None:
    raise PlanError(
        f"it runs in stage {at} but needs {facts.place(source)} of stage {later}",
        where=facts.place(node),
        fix=f"put it into stage {later} or later",
    )


def _check_sendable(node: fx.Node) -> None:
    if facts.get(node, Value) is None:
        raise PlanError(
            "its result is no tensor and cannot cross a stage boundary",
            where=facts.place(node),
            fix="keep the modules that use it in one stage",
        )


def _build(
    graph: fx.Graph,
    stage: int,
    stage_of: Mapping[fx.Node, int],
    received: Iterable[fx.Node],
    sent: Iterable[fx.Node] | None,
    answers: tuple[Any, ...],
    keeps: Mapping[int, fx.Node],
) -> StageGraph:
    """One stage's graph; `sent` None marks the last stage, which returns the program's outputs."""
    received = tuple(received)
    end = output_node(graph)
    results: tuple[Any, ...] = (*(answers if sent is None else sent), *keeps.values())
    needed = _needed(graph, stage, stage_of, received, results)
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in needed if node.op == "placeholder"]
    sizes = [node for node in inputs if node.target == BATCH_SIZE]
    reads = [node for node in inputs if node.target != BATCH_SIZE]
    for node in (*reads, *received, *sizes):
        mapping[node] = new.placeholder(str(node.target) if node.op == "placeholder" else node.name)
        mapping[node].meta = dict(node.meta)
        facts.drop(mapping[node], Cost)  # what it cost to make was paid where it was made
    for node in needed:
        if node not in mapping:
            mapping[node] = new.node_copy(node, mapping.__getitem__)
    new.output(map_arg(results, mapping.__getitem__)).meta = dict(end.meta)
    return StageGraph(
        graph=new,
        reads=tuple(str(node.target) for node in reads),
        receives=_ports(received),
        sends=_ports(sent or ()),
        tensors=tuple(dict.fromkeys(str(n.target) for n in needed if n.op == "get_attr" and n.target != TRAINING)),
        leaves=tuple(dict.fromkeys(path for n in needed for path in leaf_paths(n))),
        keeps=tuple(keeps),
    )


def _ports(nodes: Iterable[fx.Node]) -> tuple[Port, ...]:
    return tuple(_port(node) for node in nodes)


def _port(node: fx.Node) -> Port:
    """What few states a value has, and so whether it travels as bits, its domain says."""
    value = facts.need(node, Value)
    return Port(node.name, value, states_of(facts.get(node, Domain), value.dtype))


def _needed(
    graph: fx.Graph,
    stage: int,
    stage_of: Mapping[fx.Node, int],
    received: Iterable[fx.Node],
    results: Iterable[object],
) -> list[fx.Node]:
    """The nodes to copy into the stage, in graph order: its own, and what these need of the nodes without a stage."""
    have = set(received)
    wanted = {node for node, at in stage_of.items() if at == stage} | {n for n in results if isinstance(n, fx.Node)}
    wanted -= have
    for node in reversed(graph.nodes):
        if node in wanted:
            wanted.update(source for source in node.all_input_nodes if source not in have)
    return [node for node in graph.nodes if node in wanted]
