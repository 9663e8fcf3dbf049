"""Nodes as lines of text.

%x = input x : float32[2+n, 3, 8, 8]
%w = @conv1.weight : float32[8, 3, 3, 3] grad
%y = torch.conv2d(%x, %w, None, (1, 1)) : float32[2+n, 8, 6, 6] grad {Stage(index=1)} from conv1 at "net.py":12
%c = .contiguous(%y) : ...
%s = &sn1(%c) : ...
%z = surrogate my.module:Spike(%c) : ...
return (%z,)

A loop is followed by the graphs of its steps, which end with their `return`:

%loop = loop 4 (all, last)((%x,), (%w,), (None,)) : ...
  body
    %step0 = input step0 : ...
    return (%m, %s, %m)

and a fused neuron of 4 steps, whose states are kept in float32, by what it stands for:

%f = fused 4 float32(%y) : ...
  region
    %y = input y : ...
    return (%s,)
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from snnpart import facts
from snnpart.errors import ConfigError
from snnpart.facts import Origin, Value, Values
from snnpart.ops import Surrogate
from snnpart.ops_fused import WAYS, FusedNeuron
from snnpart.ops_later import WeightLater
from snnpart.ops_packed import PackedInput
from snnpart.ops_time import Keep, Loop, Nested
from snnpart.plan import STATE_DTYPES
from snnpart.text import functions, literals, types
from snnpart.text.lexer import Line, lines
from snnpart.text.literals import Reader

_OWN_SYNTAX = (Value, Values, Origin)
_OPERATOR_METHOD = re.compile(
    r"__[ri]?(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor)__|__(neg|pos|abs|invert|eq|ne|lt|le|gt|ge|getitem)__"
)


def print_fx(graph: fx.Graph, *, with_facts: bool = True, with_origin: bool = True) -> str:
    """One line per node. Value and Values are always written, the other facts and the origin as asked.

    Raises:
        ConfigError: an argument has no text form; the message names the node.
    """
    return "".join(f"{line}\n" for line in _print(graph, with_facts, with_origin))


def _print(graph: fx.Graph, with_facts: bool, with_origin: bool) -> Iterator[str]:
    for node in graph.nodes:
        yield print_node(node, with_facts, with_origin)
        if isinstance(node.target, Nested):
            for name, inner in zip(_blocks(node.target), node.target.graphs):
                yield f"  {name}"
                yield from (f"    {line}" for line in _print(inner, with_facts, with_origin))


def _blocks(target: Nested) -> tuple[str, ...]:
    return ("region",) if isinstance(target, FusedNeuron) else ("body", "first")


def print_node(node: fx.Node, with_facts: bool = True, with_origin: bool = True) -> str:
    """The line of one node."""
    try:
        parts = [_head(node), _type(node)]
        if with_facts:
            parts.append(_facts(node))
    except ConfigError as error:
        raise ConfigError(error.what, where=facts.place(node), fix="make it an input or a buffer") from error
    if with_origin:
        parts.append(_origin(node))
    return "".join(parts)


def _head(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {literals.write(node.args[0])}"
    return f"%{node.name} = {_expression(node)}"


def _expression(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"input {node.target}"
    if node.op == "get_attr":
        return f"@{literals.write_path(str(node.target))}"
    arguments = [literals.write(arg) for arg in node.args]
    arguments += [f"{key}={literals.write(value)}" for key, value in node.kwargs.items()]
    return f"{target_text(node)}({', '.join(arguments)})"


def target_text(node: fx.Node) -> str:
    """What a node calls, as its line says it."""
    target: Any = node.target
    if node.op == "call_module":
        return f"&{literals.write_path(target)}"
    if node.op == "call_method":
        return f".{target}"
    if isinstance(target, Surrogate):
        return f"surrogate {functions.class_path(target.function)}"
    if isinstance(target, Loop):
        together = f" by {target.together}" if target.together else ""
        return f"loop {target.steps}{together} ({', '.join(target.keep)})"
    if isinstance(target, FusedNeuron):
        return f"fused {target.steps} {target.state}" + ("" if target.way == WAYS[0] else f" {target.way}")
    if isinstance(target, PackedInput):
        low, count = target.states
        return f"packed {low} {count} {functions.path_of(target.function)}"
    if isinstance(target, WeightLater):
        return f"weight_later {functions.path_of(target.function)}"
    path = functions.path_of(target)
    kind = "class " if isinstance(target, type) else "function " if ":" in path else ""
    return f"{kind}{path}"


def _type(node: fx.Node) -> str:
    value, several = facts.get(node, Value), facts.get(node, Values)
    if value is not None:
        return f" : {types.write_value(value)}"
    return f" : {types.write_values(several.items)}" if several is not None else ""


def _facts(node: fx.Node) -> str:
    held = [fact for kind, fact in facts.every(node).items() if kind not in _OWN_SYNTAX]
    ordered = sorted(held, key=lambda fact: type(fact).__name__)
    return f" {{{', '.join(map(literals.write_fact, ordered))}}}" if ordered else ""


def _origin(node: fx.Node) -> str:
    origin = facts.get(node, Origin)
    if origin is None:
        return ""
    at = f" at {literals.write(origin.file)}:{origin.line}" if origin.file or origin.line else ""
    by = f" by {literals.write_path(origin.made_by)}" if origin.made_by != "trace" else ""
    return f" from {literals.write_path(origin.module)}{at}{by}"


def parse_fx(text: str, *, modules: Collection[str] | None = None, first_line: int = 1) -> fx.Graph:
    """The graph that `print_fx` wrote, with its facts.

    `modules` are the top-level modules whose surrogate and NamedTuple classes may be imported (None: any).

    Raises:
        ConfigError: with line and column.
    """
    return parse_lines(lines(text, first_line), modules)


def parse_lines(found: list[Line], modules: Collection[str] | None) -> fx.Graph:
    """The graph of already split lines."""
    rest = deque(found)
    graph = _read_graph(rest, modules, found[-1].number if found else 1)
    if rest:
        raise rest[0].error("the graph ended with the return above", 1)
    return graph


def _read_graph(rest: deque[Line], modules: Collection[str] | None, last: int) -> fx.Graph:
    """Lines up to and with the return."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    reader = Reader(nodes, modules)
    while rest:
        line = rest.popleft()
        node = _read_line(line, graph, nodes, reader, rest)
        _read_facts(line, node, reader)
        line.end()
        if node.op == "output":
            return graph
    raise ConfigError("the graph does not end with a return", where=f"line {last}")


def _read_line(line: Line, graph: fx.Graph, nodes: dict[str, fx.Node], reader: Reader, rest: deque[Line]) -> fx.Node:
    if line.take("return"):
        return graph.output(reader.read(line))
    token = line.need("node", "a node (%name) or return")
    name = token.text[1:]
    if name in nodes:
        raise line.error(f"%{name} is defined twice", token.column)
    line.expect("=")
    op, target = _read_target(line, reader, rest)
    args, kwargs = ((), {}) if op in ("placeholder", "get_attr") else _read_arguments(line, reader)
    node = graph.create_node(op, target, args, kwargs, name)
    if node.name != name:
        raise line.error(f"%{name} is a reserved name", token.column)
    nodes[name] = node
    return node


def _read_target(line: Line, reader: Reader, rest: deque[Line]) -> tuple[str, Any]:
    kind = line.peek.kind
    if kind in ("tensor", "leaf"):
        path = _unquote(line.next().text[1:])
        return ("get_attr" if kind == "tensor" else "call_module"), path
    if kind == "method":
        return "call_method", _method(line)
    if line.take("input"):
        return "placeholder", line.need("name", "the name of the input").text
    if line.peek.text == "loop":
        return "call_function", _loop(line, reader, rest)
    if line.take("fused"):
        return "call_function", _fused(line, reader, rest)
    if line.take("packed"):
        low, count = (int(reader.read(line)) for _ in range(2))
        return "call_function", PackedInput(_function(line), (low, count))
    if line.take("weight_later"):
        return "call_function", WeightLater(_function(line))
    if line.take("surrogate"):
        return "call_function", _surrogate(line, reader)
    if line.take("class"):
        return "call_function", reader.named_tuple_class(line)
    return "call_function", _function(line)


def _unquote(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _method(line: Line) -> str:
    name = line.peek.text[1:]
    hidden = name.startswith("_") and not _OPERATOR_METHOD.fullmatch(name)
    if hidden or not callable(getattr(torch.Tensor, name, None)):
        raise line.error(f"a tensor has no method '{name}'")
    line.next()
    return name


def _surrogate(line: Line, reader: Reader) -> Surrogate:
    token = line.need("class", "a class (module:name)")
    try:
        return Surrogate(functions.import_class(token.text, torch.autograd.Function, reader.modules))
    except ConfigError as error:
        raise line.error(str(error), token.column) from error


def _loop(line: Line, reader: Reader, rest: deque[Line]) -> Loop:
    line.expect("loop")
    steps = types.read_int(line)
    together = types.read_int(line) if line.take("by") else 0
    line.expect("(")
    keep: list[Keep] = []
    while not line.take(")"):
        word = line.need("name", "all or last")
        if word.text not in ("all", "last"):
            raise line.error(f"'{word.text}' is not kept", word.column, ("all", "last"))
        keep.append("all" if word.text == "all" else "last")
        line.take(",")
    body = _block("body", line, reader, rest)
    first = _block("first", line, reader, rest) if rest and rest[0].peek.text == "first" else None
    return Loop(body, steps, tuple(keep), first, together)


def _fused(line: Line, reader: Reader, rest: deque[Line]) -> FusedNeuron:
    steps = types.read_int(line)
    state = line.need("name", "the dtype of states")
    if state.text not in STATE_DTYPES:
        raise line.error(f"states are not kept in '{state.text}'", state.column, STATE_DTYPES)
    way = next((way for way in WAYS[1:] if line.take(way)), WAYS[0])
    return FusedNeuron(_block("region", line, reader, rest, "a fused neuron"), steps, state.text, way=way)


def _block(name: str, line: Line, reader: Reader, rest: deque[Line], owner: str = "a loop") -> fx.Graph:
    if not rest or rest[0].peek.text != name:
        raise line.error(f"{owner} is followed by its {name}", 1)
    head = rest.popleft()
    head.expect(name)
    head.end()
    return _read_graph(rest, reader.modules, head.number)


def _function(line: Line) -> Any:
    token = line.next()
    path = line.peek.text if token.text == "function" else token.text
    known = functions.table().get(path)
    if known is None:
        raise line.error(f"'{path}' is no function that a graph may call", token.column)
    return known


def _read_arguments(line: Line, reader: Reader) -> tuple[tuple[Any, ...], dict[str, Any]]:
    line.expect("(")
    args: list[Any] = []
    while not line.take(")"):
        if line.peek.kind == "name" and line.tokens[line.at + 1].text == "=":
            return tuple(args), reader.keywords(line)
        args.append(reader.read(line))
        if not line.take(","):
            line.expect(")")
            break
    return tuple(args), {}


def _read_facts(line: Line, node: fx.Node, reader: Reader) -> None:
    if line.take(":"):
        known = types.read_type(line, reader)
        facts.put(node, known if isinstance(known, Value) else Values(known))
    if line.take("{"):
        facts.put(node, *reader.sequence(line, "}"))
    if line.take("from"):
        facts.put(node, _read_origin(line))


def _read_origin(line: Line) -> Origin:
    module, file, number, made_by = literals.read_path(line), "", 0, "trace"
    if line.take("at"):
        file = literals.read_string(line)
        line.expect(":")
        number = types.read_int(line)
    if line.take("by"):
        made_by = literals.read_path(line)
    return Origin(module, file, number, made_by)
