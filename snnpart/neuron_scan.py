"""The scan inside a fused neuron's region, and its recorded step, made once for layers that are configured alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from snnpart import facts, frameworks
from snnpart.compat import TorchDispatchMode
from snnpart.errors import SnnpartError
from snnpart.facts import Value
from snnpart.first_states import start_number
from snnpart.neuron_step import (
    NeuronStep,
    Runner,
    Scan,
    Start,
    StepError,
    Whole,
    plain_copy,
    scan_of_leaf,
    scan_of_loop,
    trace_step,
)
from snnpart.ops_fused import FusedNeuron, is_turned, parts, scan_input
from snnpart.ops_time import Loop, leaf_paths
from snnpart.scan_order import Order, order_of
from snnpart.step_code import check_code
from snnpart.text.nodes import print_fx

_EXAMPLE = 0.5
_known: dict[str, NeuronStep | str] = {}


def step_of_region(target: FusedNeuron, module: nn.Module) -> NeuronStep:
    """The step of a fused neuron whose leaves hang in `module` under their paths.

    Raises:
        StepError: it has none, or none that can be written as a kernel.
    """
    if target.recorded is not None:
        return target.recorded
    scan = parts(target.region).scan
    leaves = {path: module.get_submodule(path) for path in leaf_paths(scan)}
    return step_of(scan, leaves)


def step_of(scan: fx.Node, leaves: Mapping[str, nn.Module]) -> NeuronStep:
    """The step of a scan node, a neuron layer's or a loop's, over its leaves; StepError as above."""
    loop, own = _plain(scan, leaves)
    key = _key(scan, loop, own)
    found = None if key is None else _known.get(key)
    if found is None:
        try:
            with torch.random.fork_rng(devices=[]):
                found = trace_step(_scan(scan, loop, own), step_dims(scan, leaves))
            check_code(found)
        except StepError as error:
            found = str(error)
        if key is not None:
            _known[key] = found
    if isinstance(found, str):
        raise StepError(found)
    return found


def order_of_scan(scan: fx.Node, leaves: Mapping[str, nn.Module]) -> Order:
    """The order of a scan node's sequence, a loop's or a layer's; `leaves` by their paths."""
    if scan.op != "call_module":
        return Order(samples_first=is_turned(scan))
    return order_of(leaves[str(scan.target)]) or Order()


def steps_of(scan: fx.Node, leaves: Mapping[str, nn.Module]) -> int:
    """How many steps a scan node takes."""
    order, shape = order_of_scan(scan, leaves), facts.need(scan_input(scan), Value).shape
    if not order.merged:
        return shape[1 if order.samples_first else 0]
    module = leaves[str(scan.target)]
    return frameworks.adapter_for(module).merged_steps(module, shape[0]) or 1


def step_dims(scan: fx.Node, leaves: Mapping[str, nn.Module]) -> int:
    """How many dims one step of the scan's sequence has."""
    return len(order_of_scan(scan, leaves).step_shape(facts.need(scan_input(scan), Value).shape))


def draws(scan: fx.Node, leaves: Mapping[str, nn.Module]) -> bool | None:
    """Whether two steps of the scan, forward and backward, draw random numbers; None where that cannot be tried."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _WatchDraws() as watch:
        before = torch.get_rng_state()
        try:
            _run(scan, leaves)
        except Exception:  # whatever a user's module raises here: nothing more is known of it then
            return watch.drawn or None
        return watch.drawn or not torch.equal(before, torch.get_rng_state())


class _WatchDraws(TorchDispatchMode):
    """Notes whether an operation draws random numbers, also one that then refuses what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drawn = self.drawn or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _run(scan: fx.Node, leaves: Mapping[str, nn.Module]) -> None:
    """A few steps of the scan on one sample."""
    value, order, (loop, own) = facts.need(scan_input(scan), Value), order_of_scan(scan, leaves), _plain(scan, leaves)
    shape = order.step_shape([1 if slope else size for size, slope in zip(value.shape, value.slopes, strict=True)])
    if loop is None:
        (leaf,) = own.values()
        steps = steps_of(scan, leaves)
        made = Whole(plain_copy(leaf), order)(torch.ones((steps, *shape), requires_grad=True))
    else:
        found, x = _scan(scan, loop, own), torch.ones(shape, requires_grad=True)
        run = Runner(found)
        state, first = run(x, found.fixed, None)
        made = first + run(x, found.fixed, state)[1]
    if made.requires_grad:
        made.sum().backward()


def _plain(scan: fx.Node, leaves: Mapping[str, nn.Module]) -> tuple[Loop | None, dict[str, nn.Module]]:
    """The scan's loop and its leaves under names that do not depend on where they are in the network."""
    names = {path: leaf_name(i) for i, path in enumerate(leaf_paths(scan))}
    loop = scan.target if isinstance(scan.target, Loop) else None
    if loop is not None:
        graphs = [_renamed(graph, names) for graph in loop.graphs]
        loop = replace(loop, body=graphs[0], first=graphs[1] if len(graphs) > 1 else None)
    return loop, {name: leaves[path] for path, name in names.items()}


def leaf_name(index: int) -> str:
    """The name under which a step's parameters know the scan's leaf number `index`."""
    return f"leaf{index}"


def leaf_number(name: str) -> int:
    """Which of the scan's leaves `leaf_name` gave this name."""
    return int(name.removeprefix("leaf"))


def _renamed(graph: fx.Graph, names: Mapping[str, str]) -> fx.Graph:
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    for node in made.nodes:
        if node.op == "call_module":
            node.target = names[str(node.target)]
    return made


def _key(scan: fx.Node, loop: Loop | None, leaves: Mapping[str, nn.Module]) -> str | None:
    """A text that is equal for equal scans; None where a leaf is no data."""
    try:
        encoded = [(name, json.dumps(frameworks.encode_leaf(leaf), default=str)) for name, leaf in leaves.items()]
    except SnnpartError:
        return None
    dims = len(facts.need(scan_input(scan), Value).shape)
    if loop is None:
        return repr((dims, encoded))
    graphs = [print_fx(graph, with_facts=False, with_origin=False) for graph in loop.graphs]
    given: Any = scan.args
    _, fixed, carried = given
    return repr((dims, encoded, graphs, list(map(_fixed, fixed)), _starts(carried, fixed), _result(scan)))


def _result(scan: fx.Node) -> int:
    """Which result of a loop is used."""
    (index,) = {user.args[1] for user in scan.users}
    return int(index)  # type: ignore[arg-type]


def _scan(scan: fx.Node, loop: Loop | None, leaves: Mapping[str, nn.Module]) -> Scan:
    if loop is None:
        ((name, leaf),) = leaves.items()
        return scan_of_leaf(name, leaf)
    given: Any = scan.args
    _, fixed, carried = given
    return scan_of_loop(loop, leaves, list(map(_fixed, fixed)), _starts(carried, fixed), _result(scan))


def _fixed(item: Any) -> Any:
    """An example of a value that every step is given."""
    return torch.full((1,), _EXAMPLE) if isinstance(item, fx.Node) else item


def _starts(carried: Sequence[Any], fixed: Sequence[Any]) -> list[Any]:
    return [_start(item, fixed) for item in carried]


def _start(item: Any, fixed: Sequence[Any]) -> Any:
    """What a loop is first given as state: nothing, an empty tensor, or one number everywhere."""
    if not isinstance(item, fx.Node):
        return item
    value = facts.get(item, Value)
    if value is not None and value.numel == 0:
        return Start(None)
    number = start_number(item, fixed)
    if number is None:
        raise StepError("its first state is computed outside the loop")
    return Start(number)
