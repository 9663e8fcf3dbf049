"""The text form: what is printed parses back to an equal graph; what cannot be read is refused with line and column."""

from __future__ import annotations

import math
import operator
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from snnpart import facts
from snnpart.errors import ConfigError
from snnpart.facts import Cost, Domain, Origin, Partial, Placement, Replicated, Sharded, Stage, TimeRole, Value, Values
from snnpart.graph import InputInfo, OutputInfo, SpikeGraph
from snnpart.ops import Surrogate, affine
from snnpart.pass_manager import PassManager
from snnpart.passes import ANALYZE, REWRITE
from snnpart.text import UnboundLeaf, functions, parse_fx, parse_graph, print_fx, print_graph
from snnpart.trace import trace
from tests.graphs import graph_of
from tests.zoo import ZOO

Point = namedtuple("Point", "x y")


class Step(torch.autograd.Function):
    """A surrogate at the top level of a module, as the text form needs it."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return (u >= 0).to(u)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([torch.float32, torch.int64, torch.channels_last, torch.strided, torch.device("cuda:1"), ...])
    | st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none() | st.integers(1, 3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=8,
)
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}(\.[a-z0-9_]{1,4}){0,2}", fullmatch=True) | st.text(max_size=6)


@st.composite
def values(draw: st.DrawFn) -> Value:
    shape = draw(SHAPES)
    slopes = tuple(draw(st.integers(-3, 12)) for _ in shape)
    stride = (
        draw(st.sampled_from([(), tuple(range(len(shape)))])) if draw(st.booleans()) else torch.empty(shape).stride()
    )
    return Value(
        shape,
        draw(st.sampled_from([torch.float32, torch.float64, torch.bool])),
        slopes,
        tuple(stride),
        draw(st.booleans()),
    )


FACTS = st.one_of(
    st.builds(Domain, st.sampled_from(["spike", "real"]), st.floats(-9, 9), st.floats()).filter(
        lambda d: not math.isnan(d.high)
    ),
    st.builds(TimeRole, st.none() | st.integers(0, 4), st.booleans(), st.none() | st.integers(0, 9), st.booleans()),
    st.builds(Stage, st.integers(0, 9)),
    st.builds(Cost, st.floats(0, 1e18)),
    st.just(Placement("column", Sharded(1, (((0, 2), (3, 4)), ((2, 3),))), (Replicated(), Partial()), (0,))),
)
TARGETS = [
    torch.add,
    torch.conv2d,
    torch.nn.functional.linear,
    operator.getitem,
    affine,
    torch.zeros,
    Surrogate(Step),
    Point,
]


@st.composite
def graphs(draw: st.DrawFn) -> fx.Graph:
    """Any graph of the IR's form, meaningful or not."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x"), graph.get_attr("layer.0.weight")]
    for _ in range(draw(st.integers(0, 5))):
        used = draw(st.lists(st.sampled_from(nodes) | LITERALS, max_size=3))
        op, target = draw(
            st.sampled_from([("call_function", t) for t in TARGETS] + [("call_method", "view"), ("call_module", "0.1")])
        )
        kwargs = draw(st.dictionaries(st.sampled_from(["dim", "dtype", "inplace"]), LITERALS, max_size=2))
        nodes.append(graph.create_node(op, target, tuple(used), kwargs))
    for node in nodes:
        facts.put(node, *draw(st.lists(FACTS, max_size=3)))
        if draw(st.booleans()):
            facts.put(node, draw(values()) if draw(st.booleans()) else Values((draw(values()), None, 3)))
        if draw(st.booleans()):
            facts.put(node, Origin(draw(NAMES), draw(st.text(max_size=5)), draw(st.integers(0, 99)), draw(NAMES)))
    graph.output(tuple(draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=3))))
    return graph


def _plain(item: Any) -> Any:
    return fx.node.map_arg(item, lambda node: f"%{node.name}")


@settings(max_examples=80, deadline=None)
@given(graphs())
def test_any_graph_parses_back_equal(graph: fx.Graph) -> None:
    found = parse_fx(print_fx(graph))
    assert len(found.nodes) == len(graph.nodes)
    for a, b in zip(graph.nodes, found.nodes, strict=True):
        assert (a.name, a.op, a.target) == (b.name, b.op, b.target)
        assert repr(_plain((a.args, a.kwargs))) == repr(_plain((b.args, b.kwargs)))
        assert dict(facts.every(a)) == dict(facts.every(b))
    assert print_fx(found) == print_fx(graph)


@settings(max_examples=80, deadline=None)
@given(LITERALS)
def test_literals_keep_type_and_value(literal: Any) -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.add, (literal,)),))
    (node, _) = parse_fx(print_fx(graph)).nodes
    assert repr(node.args[0]) == repr(graph.find_nodes(op="call_function", target=torch.add)[0].args[0])


def test_nan_and_infinities() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.add, (math.nan, math.inf, -math.inf, -0.0, 1e300, 5e-324, 1 + 2j)),))
    node = next(iter(parse_fx(print_fx(graph)).nodes))
    assert repr(node.args) == repr((math.nan, math.inf, -math.inf, -0.0, 1e300, 5e-324, 1 + 2j))


def test_types_show_how_dims_grow() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    graph.output((node,))
    facts.put(node, Value((128, 2, 7, 3), torch.float32, (4, 1, 0, -1), (42, 21, 3, 1), True))
    assert print_fx(graph).startswith("%x = input x : float32[128+4n, 2+n, 7, 3-n] grad\n")


@pytest.mark.parametrize("name", ["small_sew-m", "snntorch_rleaky", "norse_lsnn", "unet", "ms_resnet"])
def test_traced_networks_parse_back(name: str) -> None:
    if name not in ZOO:
        pytest.skip("the framework is not installed")
    module, inputs = ZOO[name].build()
    graph = trace(module, inputs, **ZOO[name].dims)
    for passes in ((), REWRITE, ANALYZE):
        PassManager(passes).run(graph)
        found = parse_graph(
            print_graph(graph),
            tensors={key: info.tensor for key, info in graph.tensors.items()},
            leaves={path: info.module for path, info in graph.leaves.items()},
        )
        assert print_graph(found) == print_graph(graph)
        assert (found.tensors, found.leaves, found.inputs) == (graph.tensors, graph.leaves, graph.inputs)
        assert (found.in_spec, found.out_spec, found.outputs) == (graph.in_spec, graph.out_spec, graph.outputs)
        assert (found.states, found.assumptions, found.notes) == (graph.states, graph.assumptions, graph.notes)


def test_structures_of_inputs_and_outputs_come_back() -> None:
    def forward(x: Tensor) -> Any:
        return {"a": x + 1, "b": [x * 2, (x, None)]}, 3

    graph = graph_of(forward, torch.rand(2, 3))
    found = parse_graph(print_graph(graph))
    assert found.out_spec == graph.out_spec and found.out_constants == graph.out_constants


def test_without_values_tensors_are_meta_and_leaves_unbound() -> None:
    graph = graph_of(lambda m, x: m.fc(x), torch.rand(2, 3), layers={"fc": nn.Linear(3, 4)})
    found = parse_graph(print_graph(graph))
    assert found.tensors["fc.weight"].tensor.device.type == "meta"
    assert found.tensors["fc.weight"].tensor.requires_grad
    leaf = UnboundLeaf("my.module:LIF")
    with pytest.raises(ConfigError, match="only the class of this layer is known"):
        leaf(torch.rand(2))


def test_a_tensor_of_another_shape_is_refused() -> None:
    graph = graph_of(lambda m, x: m.fc(x), torch.rand(2, 3), layers={"fc": nn.Linear(3, 4)})
    with pytest.raises(ConfigError, match="the tensor given for 'fc.weight' is torch.float32 \\(5, 3\\)"):
        parse_graph(print_graph(graph), tensors={"fc.weight": torch.rand(5, 3)})


HEADER = 'snnpart 1 graph "g"\nbatch 2\nin_spec *\nout_spec (*,)\n'
BROKEN = {
    "%x = input x\n%y = torch.load(%x)\nreturn (%y,)": "line 2, column 6: 'torch.load' is no function that a graph",
    "%x = input x\n%y = builtins.eval(%x)\nreturn (%y,)": "line 2, column 6: 'builtins.eval' is no function",
    "%x = input x\n%y = torch.from_file(%x)\nreturn (%y,)": "'torch.from_file' is no function",
    "%y = torch.add(%z)\nreturn (%y,)": "line 1, column 16: %z is not defined above",
    "%x = input x\nreturn (%x,) %x": "line 2, column 14: '%x' is left over",
    "%x = input x\n%y = .__reduce__(%x)\nreturn (%y,)": "line 2, column 6: a tensor has no method '__reduce__'",
    "%x = input x\n%x = input y\nreturn (%x,)": "line 2, column 1: %x is defined twice",
    "%x = $": "line 1, column 6: '$' cannot begin anything",
    "%x = input x\n%y = torch.add(%x, 1": "line 2, column 21: ')' is expected here",
    "%x = input x : float33[2]\nreturn (%x,)": "line 1, column 16: 'float33' is no value",
    "%x = input x : float32[2.5]\nreturn (%x,)": "line 1, column 24: 2.5 is no whole number",
    "%x = surrogate torch.nn:Linear()\nreturn (%x,)": "'torch.nn:Linear' is not a subclass of Function",
    "%x = surrogate torch.nowhere:X()\nreturn (%x,)": "cannot be imported",
    "%x = torch.add(os.environ)\nreturn (%x,)": "line 1, column 16: 'os.environ' is no value",
    "%x = input x {Nothing()}\nreturn (%x,)": "'Nothing' cannot be made here",
    "%x = input x": "the graph does not end with a return",
    "": "the graph does not end with a return",
}


@pytest.mark.parametrize("text", BROKEN)
def test_what_cannot_be_read_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(BROKEN[text])):
        parse_fx(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch 2", "the text does not begin with 'snnpart'"),
        ('snnpart 7 graph "g"', "version 7 of the text form is not 1"),
        ('snnpart 1 graph "g"\nbutch 2', "line 2, column 1: 'butch' is no statement"),
        ('snnpart 1 graph "g"\n%x = input x\nreturn (%x,)', "the header lacks"),
        (HEADER, "the text ends before the first node"),
        (HEADER + "tensor weight w : float32[2]", "'weight' is no kind of tensor"),
        (HEADER + "traced sometimes", "'sometimes' is no mode"),
    ],
)
def test_headers_are_checked(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_graph(text)


def test_classes_come_only_from_allowed_modules() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(Surrogate(Step), (graph.placeholder("x"),)),))
    text = print_fx(graph)
    assert parse_fx(text, modules=["tests"])
    with pytest.raises(ConfigError, match="outside the modules this graph may import"):
        parse_fx(text, modules=["torch"])


def test_a_tensor_among_the_arguments_has_no_text() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.add, (graph.placeholder("x"), torch.ones(2))),))
    with pytest.raises(ConfigError, match="node %add: a Tensor has no text form"):
        print_fx(graph)


def test_the_table_of_functions_reads_no_files() -> None:
    table = functions.table()
    assert {"torch.conv2d", "torch.zeros", "torch.nn.functional.linear", "snnpart.ops.batch_norm"} <= set(table)
    for word in ("load", "save", "file", "numpy", "compile", "set_", "import", "hub"):
        assert not [path for path in table if word in path.rpartition(".")[2] and not path.endswith("huber_loss")]
    assert not [path for path in table if path.endswith("_") and not path.startswith("operator.")]


def test_empty_graph_of_one_input() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    facts.put(x, Value((2,), torch.float32, (1,), (1,)))
    graph.output((x,))
    from torch.utils._pytree import tree_structure

    spike = SpikeGraph(
        name='a "name"', graph=graph, tensors={}, leaves={}, inputs=(InputInfo("x", (2,), torch.float32, 0),),
        outputs=(OutputInfo("y[0]", None),), in_spec=tree_structure(0), out_spec=tree_structure((0,)), batch=2,
        batch_fixed="it's fixed", time_steps=3, traced_training=False, training_specialised=True,
    )  # fmt: skip
    found = parse_graph(print_graph(spike))
    assert (found.name, found.batch_fixed, found.time_steps) == (spike.name, spike.batch_fixed, 3)
    assert (found.traced_training, found.training_specialised, found.outputs) == (False, True, spike.outputs)


def test_the_example_of_the_docs_parses() -> None:
    page = (Path(__file__).parents[1] / "docs" / "ir.md").read_text()
    example = page[page.index("    snnpart 1 graph") : page.index("Grammar (")]
    text = "\n".join(line.removeprefix("    ") for line in example.strip().splitlines()) + "\n"
    assert print_graph(parse_graph(text)) == text
