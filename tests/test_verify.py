"""Every rule of the IR: a graph that breaks it is refused, with the node, the user's line and the neighbours."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from snnpart import facts, verify
from snnpart.errors import VerifyError
from snnpart.facts import Cost, Domain, Placement, Replicated, Stage, TimeRole, Value, Values
from snnpart.graph import BATCH_SIZE, SpikeGraph, output_node
from tests.graphs import calls, graph_of


def forward(m: nn.Module, x: Tensor) -> Tensor:
    a, b = torch.chunk(m.fc(x).relu(), 2, 1)
    return a.view(x.shape[0], 1, 2) + b.unsqueeze(1)


@pytest.fixture
def graph() -> SpikeGraph:
    made = graph_of(forward, torch.rand(3, 5), layers={"fc": nn.Linear(5, 4)})
    verify.verify(made)
    return made


def _swap(graph: SpikeGraph) -> None:
    item = _item(graph)
    item.append(item.args[0])  # type: ignore[arg-type]


def _late_placeholder(graph: SpikeGraph) -> None:
    with graph.graph.inserting_before(output_node(graph.graph)):
        graph.graph.placeholder("late")


def _renamed_input(graph: SpikeGraph) -> None:
    next(iter(graph.graph.nodes)).target = "other"


def _nested_output(graph: SpikeGraph) -> None:
    output_node(graph.graph).args = ([output_node(graph.graph).args[0]],)


def _more_outputs(graph: SpikeGraph) -> None:
    node = output_node(graph.graph)
    node.args = (node.args[0] * 2,)  # type: ignore[operator]


def _unknown_tensor(graph: SpikeGraph) -> None:
    del graph.tensors["fc.weight"]


def _in_place(graph: SpikeGraph) -> None:
    node = next(node for node in graph.graph.nodes if node.target in ("relu", torch.relu))
    node.op, node.target = "call_method", "relu_"


def _in_place_function(graph: SpikeGraph) -> None:
    node = next(node for node in graph.graph.nodes if node.target in ("relu", torch.relu))
    node.op, node.target = "call_function", torch.relu_


def _short_slopes(graph: SpikeGraph) -> None:
    node = _value_node(graph)
    facts.put(node, replace(facts.need(node, Value), slopes=()))


def _both(graph: SpikeGraph) -> None:
    facts.put(_value_node(graph), Values(()))


def _no_output_value(graph: SpikeGraph) -> None:
    facts.drop(output_node(graph.graph).all_input_nodes[0], Value)


def _item_out_of_range(graph: SpikeGraph) -> None:
    item = _item(graph)
    item.args = (item.args[0], 7)


def _item_without_value(graph: SpikeGraph) -> None:
    facts.drop(_item(graph), Value)


def _grows_though_fixed(graph: SpikeGraph) -> None:
    graph.batch_fixed = "the user's loop runs over the samples"


def _unused_batch_size(graph: SpikeGraph) -> None:
    (size,) = calls(graph, BATCH_SIZE)
    size.replace_all_uses_with(3)  # type: ignore[arg-type]


def _value_node(graph: SpikeGraph) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.op == "call_function" and facts.get(node, Value))


def _item(graph: SpikeGraph) -> fx.Node:
    return next(node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "getitem")


RULES: dict[Callable[[SpikeGraph], None], str] = {
    _swap: "which is not defined before it",
    _late_placeholder: "a placeholder stands after other nodes",
    _renamed_input: "the placeholders are ['other', 'batch_size'], the inputs are ['inputs_0']",
    _nested_output: "the output is not one flat tuple of nodes",
    _more_outputs: "the output has 2 values, the graph says 1",
    _unknown_tensor: "it reads 'fc.weight', which is not among the graph's tensors",
    _in_place: "it writes in place into a value that others may read",
    _in_place_function: "it writes in place into a value that others may read",
    _short_slopes: "differ in length",
    _both: "it holds both Value and Values",
    _no_output_value: "the program returns it, but it is no tensor",
    _item_out_of_range: "it takes item 7 of 2 results",
    _item_without_value: "it takes a tensor out of several results, but has no Value",
    _grows_though_fixed: "it grows with the batch, but the batch is fixed: the user's loop",
    _unused_batch_size: "no size depends on the batch, so there must be no batch_size",
}


@pytest.mark.parametrize("harm", RULES, ids=lambda harm: harm.__name__)
def test_a_broken_rule_is_named(graph: SpikeGraph, harm: Callable[[SpikeGraph], None]) -> None:
    harm(graph)
    with pytest.raises(VerifyError, match=re.escape(RULES[harm])):
        verify.verify(graph)


def test_the_message_shows_place_node_and_neighbours(graph: SpikeGraph) -> None:
    _in_place(graph)
    with pytest.raises(VerifyError) as caught:
        verify.verify(graph, after="my-pass")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("node %relu") and "test_verify.py:" in lines[0] and "after pass 'my-pass'" in lines[0]
    assert lines[0].endswith("it writes in place into a value that others may read")
    assert [line for line in lines if line.startswith(">")] == ["> %relu = call_method relu_(linear)"]
    assert 6 <= len(lines) <= 12


def test_an_in_place_method_on_a_copy_of_its_own_is_allowed(graph: SpikeGraph) -> None:
    node = next(node for node in graph.graph.nodes if node.target in ("relu", torch.relu))
    with graph.graph.inserting_before(node):
        copy = graph.graph.call_function(torch.clone, (node.args[0],))
    facts.put(copy, *facts.every(node).values())
    node.op, node.target, node.args = "call_method", "relu_", (copy,)
    verify.verify(graph)


@pytest.mark.parametrize(("level", "missing"), [("analysed", "Domain"), ("placed", "Stage")])
def test_levels_need_their_facts(graph: SpikeGraph, level: verify.Level, missing: str) -> None:
    every = (TimeRole(), Domain("real"), Cost(), Placement("replicate", Replicated()), Stage(0))
    for node in graph.graph.nodes:
        facts.put(node, *every)
    verify.verify(graph, level)
    node = _value_node(graph)
    facts.drop(node, {"Domain": Domain, "Stage": Stage}[missing])
    with pytest.raises(VerifyError, match=f"level '{level}' needs the facts \\['{missing}'\\] here"):
        verify.verify(graph, level)


def test_levels_follow_from_what_was_written() -> None:
    assert verify.level_of([]) == "traced"
    assert verify.level_of(["TimeRole", "Domain", "Cost", "Stage"]) == "analysed"
    assert verify.level_of(["TimeRole", "Domain", "Cost", "Stage", "Placement"]) == "placed"
