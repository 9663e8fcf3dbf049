"""A whole SpikeGraph as text: a header of statements, one per line, then the nodes.

    snnpart 1 graph "net"
    batch 2
    time_steps 4
    traced training specialised
    input x : float32[2, 3, 8, 8] batch 0 time none
    output y batch 0
    in_spec (*,)
    tensor parameter conv1.weight : float32[8, 3, 3, 3] grad
    leaf sn1 : class my.module:LIF framework none neuron
    layer sn1 "{...}"
    assume branch "self.training is True" "net.py:7"
    guard "N > 1" True "net.py:9"
    note stages "..."

Values of tensors are not part of the text: they are given to `parse_graph`, or meta tensors stand in. Neuron layers are
named by class and given as well, or an `UnboundLeaf` stands in; with `with_leaves` the text describes them (`layer sn1
"..."`, JSON), and `with_leaves` makes them again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_structure, tree_unflatten

from snnpart.errors import CheckpointError, ConfigError
from snnpart.facts import Value
from snnpart.frameworks.decode import decode_leaf, leaf_packages
from snnpart.frameworks.encode import encode_leaf
from snnpart.graph import Assumption, BatchGuard, InputInfo, LeafInfo, OutputInfo, SpikeGraph, StateSlot, TensorInfo
from snnpart.text import functions, literals, types
from snnpart.text.lexer import Line, lines
from snnpart.text.literals import LEAF, Reader
from snnpart.text.nodes import parse_lines, print_fx

VERSION = 1


class UnboundLeaf(nn.Module):
    """Stands for a neuron layer of which only the class is known: `path` is `module:qualname`.

    `data` is the layer's description when the text has one.
    """

    def __init__(self, path: str, data: Any = None) -> None:
        super().__init__()
        self.path, self.data = path, data

    def forward(self, *_: Any) -> Any:
        raise ConfigError(f"only the class of this layer is known ({self.path})", fix="give parse_graph(leaves=...)")


def print_graph(
    graph: SpikeGraph, *, with_facts: bool = True, with_origin: bool = True, with_leaves: bool = False
) -> str:
    """The graph as text; `with_leaves` adds a description of each neuron layer that can be described.

    Raises:
        ConfigError: an argument has no text form; the message names the node.
    """
    nodes = print_fx(graph.graph, with_facts=with_facts, with_origin=with_origin)
    described = _descriptions(graph) if with_leaves else ()
    return "\n".join([*_header(graph), *described]) + f"\n\n{nodes}"


def _descriptions(graph: SpikeGraph) -> Iterator[str]:
    for path, info in graph.leaves.items():
        try:
            data = info.module.data if isinstance(info.module, UnboundLeaf) else encode_leaf(info.module)
        except CheckpointError:
            continue
        if data is not None:
            yield f"layer {literals.write_path(path)} {literals.write(json.dumps(data, sort_keys=True))}"


def _header(graph: SpikeGraph) -> Iterator[str]:
    write, path = literals.write, literals.write_path
    yield f"snnpart {VERSION} graph {write(graph.name)}"
    yield f"batch {graph.batch}"
    if graph.batch_fixed:
        yield f"batch_fixed {write(graph.batch_fixed)}"
    if graph.time_steps is not None:
        yield f"time_steps {graph.time_steps}"
    mode = "training" if graph.traced_training else "eval"
    yield f"traced {mode}{' specialised' if graph.training_specialised else ''}"
    yield from (f"input {i.name} : {_input(i)}" for i in graph.inputs)
    yield from (f"output {path(o.name)} batch {_dim(o.batch_dim)}" for o in graph.outputs)
    yield f"in_spec {_structure(graph.in_spec)}"
    yield f"out_spec {_structure(graph.out_spec)}"
    yield from (f"constant {at} = {write(value)}" for at, value in graph.out_constants.items())
    yield from (_tensor(info) for info in graph.tensors.values())
    yield from (_leaf(info) for info in graph.leaves.values())
    yield from (f"state {path(s.module)} {path(s.name)} {write(s.initial)}" for s in graph.states)
    yield from (f"assume {path(a.kind)} {write(a.text)} {write(a.place)}" for a in graph.assumptions)
    yield from (f"guard {write(g.text)} {g.holds} {write(g.place)}" for g in graph.guards)
    yield from (f"note {path(key)} {write(text)}" for key, text in graph.notes.items())


def _dim(dim: int | None) -> str:
    return "none" if dim is None else str(dim)


def _input(info: InputInfo) -> str:
    shape = ", ".join(map(str, info.shape))
    return f"{str(info.dtype)[6:]}[{shape}] batch {_dim(info.batch_dim)} time {_dim(info.time_dim)}"


def _structure(spec: TreeSpec) -> str:
    return literals.write(tree_unflatten([LEAF] * spec.num_leaves, spec))


def _tensor(info: TensorInfo) -> str:
    tensor = info.tensor
    shape = tuple(tensor.shape)
    value = Value(shape, tensor.dtype, (0,) * len(shape), tuple(tensor.stride()), tensor.requires_grad)
    words = [
        "" if info.persistent else " transient",
        "" if info.registered else " unregistered",
        "" if info.used else " unused",
        f" leaf {literals.write_path(info.leaf)}" if info.leaf is not None else "",
        "".join(f" alias {literals.write_path(name)}{' plain' if name in info.plain else ''}" for name in info.aliases),
    ]
    return f"tensor {info.kind} {literals.write_path(info.name)} : {types.write_value(value)}{''.join(words)}"


def _leaf(info: LeafInfo) -> str:
    module = info.module
    kind = module.path if isinstance(module, UnboundLeaf) else functions.class_path(type(module))
    framework = f" framework {literals.write_path(info.framework)}"
    return f"leaf {literals.write_path(info.path)} : class {kind}{framework}{' neuron' if info.neuron else ''}"


def parse_graph(
    text: str,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    leaves: Mapping[str, nn.Module] | None = None,
    modules: Collection[str] | None = None,
    with_leaves: bool = False,
) -> SpikeGraph:
    """The graph that `print_graph` wrote.

    Args:
        tensors: values by the user's names; a tensor that is not given becomes a meta tensor.
        leaves: modules by path; one that is not given becomes an `UnboundLeaf`.
        modules: the top-level modules whose classes may be imported (None: any).
        with_leaves: make the layers that the text describes and that are not given.

    Raises:
        ConfigError: with line and column.
        CheckpointError: a described layer cannot be made.
    """
    header = _Header(Reader({}, modules), tensors or {}, leaves or {}, with_leaves)
    found = lines(text)
    while found and header.statement(found[0]):
        found.pop(0)
    if not found:
        raise ConfigError("the text ends before the first node", where=f"line {len(text.splitlines())}")
    return header.graph(parse_lines(found, modules))


@dataclass
class _Header:
    """What has been read of the header."""

    reader: Reader
    given_tensors: Mapping[str, Tensor]
    given_leaves: Mapping[str, nn.Module]
    with_leaves: bool = False
    single: dict[str, Any] = field(default_factory=dict)
    inputs: list[InputInfo] = field(default_factory=list)
    outputs: list[OutputInfo] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    leaves: dict[str, LeafInfo] = field(default_factory=dict)
    states: list[StateSlot] = field(default_factory=list)
    assumptions: list[Assumption] = field(default_factory=list)
    guards: list[BatchGuard] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def statement(self, line: Line) -> bool:
        """Read one statement; False when the nodes begin."""
        if line.peek.kind == "node" or line.peek.text == "return":
            return False
        word = line.need("name", "a statement")
        if not self.single and word.text != "snnpart":
            raise line.error("the text does not begin with 'snnpart'", word.column)
        reader = getattr(self, f"_read_{word.text}", None)
        if reader is None:
            raise line.error(f"'{word.text}' is no statement", word.column)
        reader(line)
        line.end()
        return True

    def graph(self, graph: Any) -> SpikeGraph:
        missing = {"batch", "in_spec", "out_spec"} - set(self.single)
        if missing:
            raise ConfigError(f"the header lacks {sorted(missing)}", where="line 1")
        return SpikeGraph(
            graph=graph, tensors=self.tensors, leaves=self.leaves, inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            out_constants=self.constants, states=tuple(self.states), assumptions=tuple(self.assumptions),
            guards=tuple(self.guards), notes=self.notes, **self.single,
        )  # fmt: skip

    def _read_snnpart(self, line: Line) -> None:
        version = types.read_int(line)
        if version != VERSION:
            raise line.error(f"version {version} of the text form is not {VERSION}", 9)
        line.expect("graph")
        self.single["name"] = literals.read_string(line)

    def _read_batch(self, line: Line) -> None:
        self.single["batch"] = types.read_int(line)

    def _read_batch_fixed(self, line: Line) -> None:
        self.single["batch_fixed"] = literals.read_string(line)

    def _read_time_steps(self, line: Line) -> None:
        self.single["time_steps"] = types.read_int(line)

    def _read_traced(self, line: Line) -> None:
        mode = line.need("name", "training or eval")
        if mode.text not in ("training", "eval"):
            raise line.error(f"'{mode.text}' is no mode", mode.column, ("training", "eval"))
        self.single["traced_training"] = mode.text == "training"
        self.single["training_specialised"] = line.take("specialised")

    def _read_input(self, line: Line) -> None:
        name = line.need("name", "the name of the input").text
        line.expect(":")
        value = types.read_value(line, self.reader)
        line.expect("batch")
        batch = _read_dim(line)
        line.expect("time")
        self.inputs.append(InputInfo(name, value.shape, value.dtype, batch, _read_dim(line)))

    def _read_output(self, line: Line) -> None:
        name = literals.read_path(line)
        line.expect("batch")
        self.outputs.append(OutputInfo(name, _read_dim(line)))

    def _read_in_spec(self, line: Line) -> None:
        self.single["in_spec"] = tree_structure(self.reader.read(line))

    def _read_out_spec(self, line: Line) -> None:
        self.single["out_spec"] = tree_structure(self.reader.read(line))

    def _read_constant(self, line: Line) -> None:
        at = types.read_int(line)
        line.expect("=")
        self.constants[at] = self.reader.read(line)

    def _read_tensor(self, line: Line) -> None:
        kind = line.need("name", "parameter, buffer or constant")
        if kind.text not in ("parameter", "buffer", "constant"):
            raise line.error(f"'{kind.text}' is no kind of tensor", kind.column, ("parameter", "buffer", "constant"))
        name = literals.read_path(line)
        line.expect(":")
        value = types.read_value(line, self.reader)
        tensor = self.given_tensors.get(name)
        if tensor is None:
            tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
            tensor.requires_grad_(value.requires_grad)
        elif tuple(tensor.shape) != value.shape or tensor.dtype != value.dtype:
            raise line.error(f"the tensor given for '{name}' is {tensor.dtype} {tuple(tensor.shape)}")
        info = TensorInfo(name, kind.text, tensor)  # type: ignore[arg-type]
        self.tensors[name] = _read_tensor_words(line, info)

    def _read_leaf(self, line: Line) -> None:
        path = literals.read_path(line)
        line.expect(":")
        line.expect("class")
        kind = line.need("class", "a class (module:name)").text
        line.expect("framework")
        framework = literals.read_path(line)
        module = self.given_leaves.get(path) or UnboundLeaf(kind)
        self.leaves[path] = LeafInfo(path, module, framework, line.take("neuron"))

    def _read_layer(self, line: Line) -> None:
        path, column = literals.read_path(line), line.peek.column
        if path not in self.leaves:
            raise line.error(f"'{path}' is no leaf", column)
        try:
            data = json.loads(literals.read_string(line))
        except json.JSONDecodeError as error:
            raise line.error(f"the description is not JSON: {error.msg}", column) from error
        info = self.leaves[path]
        if isinstance(info.module, UnboundLeaf):
            made = self._make(path, data) if self.with_leaves else UnboundLeaf(info.module.path, data)
            self.leaves[path] = replace(info, module=made)

    def _make(self, path: str, data: Any) -> nn.Module:
        named = {alias: info.tensor for name, info in self.tensors.items() for alias in (name, *info.aliases)}
        inside = {name[len(path) + 1 :]: tensor for name, tensor in named.items() if name.startswith(f"{path}.")}
        modules = self.reader.modules
        return decode_leaf(data, inside, modules=leaf_packages(data) if modules is None else modules)

    def _read_state(self, line: Line) -> None:
        module, name = literals.read_path(line), literals.read_path(line)
        self.states.append(StateSlot(module, name, literals.read_string(line)))

    def _read_assume(self, line: Line) -> None:
        kind = literals.read_path(line)
        self.assumptions.append(Assumption(kind, literals.read_string(line), literals.read_string(line)))

    def _read_guard(self, line: Line) -> None:
        text, holds = literals.read_string(line), self.reader.read(line)
        self.guards.append(BatchGuard(text, bool(holds), literals.read_string(line)))

    def _read_note(self, line: Line) -> None:
        key = literals.read_path(line)
        self.notes[key] = literals.read_string(line)


def _read_dim(line: Line) -> int | None:
    return None if line.take("none") else types.read_int(line)


def _read_tensor_words(line: Line, info: TensorInfo) -> TensorInfo:
    persistent, registered = not line.take("transient"), not line.take("unregistered")
    used = not line.take("unused")
    leaf = literals.read_path(line) if line.take("leaf") else None
    aliases: list[str] = []
    plain: list[str] = []
    while line.take("alias"):
        aliases.append(literals.read_path(line))
        if line.take("plain"):
            plain.append(aliases[-1])
    info = replace(info, persistent=persistent, registered=registered, used=used, leaf=leaf)
    return replace(info, aliases=tuple(aliases), plain=tuple(plain))
