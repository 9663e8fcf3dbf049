"""The step of a neuron as element-wise operations: traced from the neuron itself, for kernels to be generated from.

A *scan* runs a step T times: state is carried from step to step, one sequence goes in and one comes out. It is a loop
of the graph (`ops_time.Loop`), or a neuron layer that takes all steps at once, put into single-step form by its
adapter. What it computes is found by running it: `make_fx` records the operations of one step, and those of its vector-
Jacobian product through autograd, so that the surrogate's own backward and a detached reset are what they are.

    first.forward    (x, *p)              -> (*s, y)
    first.backward   (x, *p, *ds, dy)     -> (dx, *dp)
    next.forward     (x, *p, *s)          -> (*s, y)
    next.backward    (x, *p, *s, *ds, dy) -> (dx, *dp, *ds)

x and y are one step's input and output, p the tensors that every step reads (decays, thresholds), s the state. Every
tensor has the shape of x here, also a scalar p: no operation sums over elements, and who runs the step over real
tensors sums dp. None stands where there is no gradient.

Nothing is believed of a neuron: the recorded step is run beside the neuron over a few steps and must give the same
numbers and gradients, or `StepError` says why there is no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from snnpart import frameworks
from snnpart.frameworks.carried import give_state, take_state
from snnpart.frameworks.clone import settle
from snnpart.graph import Body
from snnpart.held_tensors import filling_with_tensors, holding
from snnpart.ops_time import Loop, leaf_paths
from snnpart.scan_order import Order, order_of

_CHECKED_STEPS = 4
_TOLERANCE = 1e-5


class StepError(Exception):
    """Why a scan has no element-wise step; the text ends a sentence that names the layer."""


@dataclass(frozen=True)
class Pass:
    """The recorded operations of one step, and of its vector-Jacobian product."""

    forward: fx.Graph
    backward: fx.Graph


@dataclass(frozen=True)
class NeuronStep:
    """A scan's first step and every later one; `parameters` names the tensors p, `states` counts s."""

    first: Pass
    next: Pass
    parameters: tuple[str, ...]
    states: int


@dataclass(frozen=True)
class Start:
    """A state that a loop is first given: filled with one number, or (None) an empty tensor."""

    number: float | None

    def like(self, x: Tensor) -> Tensor:
        return x.new_zeros(0) if self.number is None else torch.full_like(x, self.number)


@dataclass(frozen=True)
class Whole:
    """A layer that takes all steps in one call, and how its input lies."""

    layer: nn.Module
    order: Order

    def __call__(self, xs: Tensor) -> Tensor:
        """The sequence that it gives for xs, both [T, N, ...]."""
        if self.order.merged:
            frameworks.adapter_for(self.layer).merge_steps(self.layer, len(xs))
        made = self.layer(self.order.as_layer(xs))
        made = torch.stack(made) if isinstance(made, list) else made[0] if isinstance(made, tuple) else made
        return self.order.steps_first(made, len(xs))


@dataclass(frozen=True)
class Scan:
    """A scan that can be run: its graphs over a module of its own leaves, and what it is first given as state.

    `fixed` are examples of the values that every step is given besides the leaves' own tensors, `whole` a copy of the
    layer that takes all steps at once, where the scan is one.
    """

    loop: Loop
    body: Body
    paths: tuple[str, ...]
    fixed: tuple[Any, ...]
    carried: tuple[Any, ...]
    result: int
    whole: Whole | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything the steps read: fixed values by position (`0`, `1`), tensors of leaves by their paths."""
        found = {str(i): value for i, value in enumerate(self.fixed) if isinstance(value, Tensor)}
        state = {f"{path}.{name}" for path in self.paths for name in _state_buffers(self.body.get_submodule(path))}
        named = (*self.body.named_parameters(), *self.body.named_buffers())
        return found | {name: tensor for name, tensor in named if name not in state and tensor.is_floating_point()}


def scan_of_leaf(path: str, module: nn.Module) -> Scan:
    """The scan of a neuron layer that takes all steps in one call."""
    step = fx.Graph()
    out = step.call_module(path, (step.placeholder("step0"),))
    step.output((out,))
    found = scan_of_loop(Loop(step, 1, ("all",)), {path: module}, (), (), 0)
    adapter, order = frameworks.adapter_for(module), order_of(module)
    if order is None or not adapter.one_step(found.body.get_submodule(path)):
        raise StepError("it has no single-step form")
    return replace(found, whole=Whole(plain_copy(module), order))


def plain_copy(module: nn.Module) -> nn.Module:
    """A copy of a layer on the CPU in float32, without state."""
    copy = frameworks.clone_leaf(module, {}).cpu().float()
    settle(copy)
    return copy


def scan_of_loop(
    loop: Loop, leaves: Mapping[str, nn.Module], fixed: Sequence[Any], carried: Sequence[Any], result: int
) -> Scan:
    """The scan of a loop over copies of its leaves; `carried` are its first state, `result` which result is meant."""
    paths = tuple(dict.fromkeys(path for node in loop.nodes() for path in leaf_paths(node)))
    copies = {path: _single_step(leaves[path]) for path in paths}
    plain = tuple(value.detach().cpu().float() if isinstance(value, Tensor) else value for value in fixed)
    return Scan(loop, Body({}, copies), paths, plain, tuple(carried), result)


def _single_step(module: nn.Module) -> nn.Module:
    copy = frameworks.clone_leaf(module, {}).cpu().float()
    for part in copy.modules():
        frameworks.adapter_for(part).for_layout(part, multi_step=False)
    settle(copy)
    return copy


def _state_buffers(leaf: nn.Module) -> Iterator[str]:
    for path, module in leaf.named_modules():
        for name in frameworks.adapter_for(module).state_names(module):
            yield f"{path}.{name}" if path else name


def trace_step(scan: Scan, dims: int) -> NeuronStep:
    """The step of a scan whose input has `dims` dims a step.

    Raises:
        StepError: the step needs data to decide, draws random numbers, keeps state that is no tensor of the input's
            shape, or what was recorded does not compute what the scan does.
    """
    shape = (2, 3, 2, 2, 2, 2)[:dims]
    generator = torch.Generator().manual_seed(0)
    tensors = {name: _spread(value, shape) for name, value in scan.tensors().items()}
    x = torch.rand(shape, generator=generator) * 2
    try:
        found = _record(scan, x, tensors)
        _check(scan, found, tensors, shape, generator)
    except StepError:
        raise
    except Exception as error:  # whatever a user's module raises here means that it has no such step
        raise StepError(f"its step cannot be recorded: {type(error).__name__}: {str(error)[:120]}") from error
    return found


def _spread(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A parameter's first number for every element: in the trace all tensors are alike."""
    if value.numel() == 0:
        raise StepError("it reads an empty tensor")
    return torch.full(shape, float(value.detach().flatten()[0]))


class Runner(nn.Module):
    """Runs one step of a scan on given tensors, as a function of them."""

    def __init__(self, scan: Scan) -> None:
        super().__init__()
        self.body, self._scan = scan.body, scan
        self._step = scan.body.bind(scan.loop.body)
        self._first = self._step if scan.loop.first is None else scan.body.bind(scan.loop.first)

    def forward(self, x: Tensor, fixed: Sequence[Any], state: Any) -> tuple[Any, Tensor]:
        """`state` None: the first step. Returns the state after it and its output."""
        scan = self._scan
        leaves = [scan.body.get_submodule(path) for path in scan.paths]
        for leaf in leaves:
            for part in leaf.modules():
                frameworks.adapter_for(part).reset(part)
        carried = tuple(item.like(x) if isinstance(item, Start) else item for item in scan.carried)
        if state is not None:
            carried, held = state
            for leaf, own in zip(leaves, held, strict=True):
                give_state(leaf, own)
        out = (self._first if state is None else self._step)(x, *fixed, *carried)
        held = tuple(take_state(leaf, detach=False) for leaf in leaves)
        return (tuple(out[: len(carried)]), held), out[len(carried) + scan.result]


@dataclass
class _Stepper:
    """The step as a function of flat tensors, with the state's structure found when it first runs."""

    scan: Scan
    names: tuple[str, ...]
    runner: Runner
    spec: Any = None
    kept: tuple[int, ...] = ()
    constants: tuple[Any, ...] = ()

    def first(self, x: Tensor, *p: Tensor) -> tuple[Any, ...]:
        state, y = self._call(x, p, None)
        flat, self.spec = pytree.tree_flatten(state)
        if self.spec is not None and not self.constants:
            self.constants = tuple(flat)
            self.kept = tuple(i for i, item in enumerate(flat) if _is_state(item, x))
        return (*(flat[i] for i in self.kept), y)

    def next(self, x: Tensor, *rest: Tensor) -> tuple[Any, ...]:
        p, s = rest[: len(self.names)], rest[len(self.names) :]
        flat = list(self.constants)
        for i, value in zip(self.kept, s, strict=True):
            flat[i] = value
        state, y = self._call(x, p, pytree.tree_unflatten(flat, self.spec))
        found = pytree.tree_flatten(state)[0]
        return (*(found[i] for i in self.kept), y)

    def _call(self, x: Tensor, p: Sequence[Tensor], state: Any) -> tuple[Any, Tensor]:
        given = dict(zip(self.names, p, strict=True))
        fixed = [given.get(str(i), value) for i, value in enumerate(self.scan.fixed)]
        with holding(self.scan.body, {k: v for k, v in given.items() if not k.isdigit()}), filling_with_tensors():
            found: tuple[Any, Tensor] = self.runner(x, fixed, state)
        return found


def _is_state(item: Any, x: Tensor) -> bool:
    if isinstance(item, Tensor) and item.numel() and item.shape != x.shape:
        raise StepError(f"its state has shape {tuple(item.shape)} where its input has {tuple(x.shape)}")
    return isinstance(item, Tensor) and bool(item.numel())


def _record(scan: Scan, x: Tensor, tensors: Mapping[str, Tensor]) -> NeuronStep:
    stepper = _Stepper(scan, tuple(tensors), Runner(scan))
    p = tuple(tensors.values())
    with torch.no_grad():
        made = map(torch.clone, stepper.first(x, *p)[:-1])  # make_fx tells its inputs apart by identity
        forward = _traced(stepper.next, (x, *p, *made))
    used = [bool(node.users) for node in forward.nodes if node.op == "placeholder"][1 + len(p) :]
    stepper.kept = tuple(i for i, is_used in zip(stepper.kept, used, strict=True) if is_used)
    with torch.no_grad():
        s = tuple(item.clone() for item in stepper.first(x, *p)[:-1])
        first, later = _traced(stepper.first, (x, *p)), _traced(stepper.next, (x, *p, *s))
    back = (*map(torch.clone, s), x.clone())
    return NeuronStep(
        Pass(first, _traced(_pulled(stepper.first, 1 + len(p)), (x, *p, *back))),
        Pass(later, _traced(_pulled(stepper.next, 1 + len(p) + len(s)), (x, *p, *s, *back))),
        stepper.names,
        len(s),
    )


def _pulled(function: Callable[..., tuple[Any, ...]], count: int) -> Callable[..., tuple[Any, ...]]:
    """The vector-Jacobian product of `function`, which takes `count` tensors."""

    def pull(*args: Tensor) -> tuple[Any, ...]:
        given = [arg.detach().requires_grad_() for arg in args[:count]]
        with torch.enable_grad():
            made = function(*given)
        pairs = [(y, dy) for y, dy in zip(made, args[count:], strict=True) if isinstance(y, Tensor) and y.requires_grad]
        if not pairs:
            return (None,) * count
        return torch.autograd.grad([y for y, _ in pairs], given, [dy for _, dy in pairs], allow_unused=True)

    return pull


def _traced(function: Callable[..., Any], args: tuple[Tensor, ...]) -> fx.Graph:
    module = make_fx(lambda *given: function(*given))(*args)
    graph = module.graph
    graph.eliminate_dead_code()
    _inline_constants(module, graph)
    return graph


def _inline_constants(module: fx.GraphModule, graph: fx.Graph) -> None:
    """Tensors of one number that the step makes for itself become numbers."""
    for node in graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if not isinstance(value, Tensor) or value.numel() != 1 or value.requires_grad:
                raise StepError("its step reads a tensor that is neither its parameter nor its state")
            node.meta["constant"] = value.item()


def _check(
    scan: Scan, step: NeuronStep, tensors: Mapping[str, Tensor], shape: tuple[int, ...], generator: torch.Generator
) -> None:
    """StepError unless the recorded step gives the outputs and gradients of the scan itself over a few steps."""
    xs = (torch.rand((_CHECKED_STEPS, *shape), generator=generator) * 3 - 0.5).requires_grad_()
    p = [value.detach().clone().requires_grad_() for value in tensors.values()]  # some steps want gradients
    weights = torch.rand((_CHECKED_STEPS, *shape), generator=generator)
    stepper = _Stepper(scan, step.parameters, Runner(scan))
    with torch.enable_grad():
        *s, y = stepper.first(xs[0], *p)
        ys = [y]
        for x in xs[1:]:
            *s, y = stepper.next(x, *p, *s)
            ys.append(y)
        wanted = torch.stack(ys)
        if not wanted.requires_grad:
            raise StepError("no gradient passes it")
        grads = torch.autograd.grad((wanted * weights).sum(), [xs, *p], allow_unused=True)
    found, dxs, dps = run_step(step, xs.detach(), [value.detach() for value in p], weights)
    _compare("output", found, wanted.detach())
    for name, own, wanted_grad in zip(("input", *step.parameters), (dxs, *dps), grads, strict=True):
        _compare(f"gradient of {name}", own, torch.zeros_like(own) if wanted_grad is None else wanted_grad)
    if scan.whole is not None:
        _check_whole(scan.whole, xs, weights, found, dxs)


def _check_whole(whole: Whole, xs: Tensor, weights: Tensor, found: Tensor, dxs: Tensor) -> None:
    """The same beside the layer itself, all steps in one call; every number of a parameter is its first one."""
    with torch.no_grad():
        for tensor in (*whole.layer.parameters(), *whole.layer.buffers()):
            if tensor.numel() > 1:
                tensor.fill_(tensor.flatten()[0])
    with torch.enable_grad():
        wanted = whole(xs)
        (grad,) = torch.autograd.grad((wanted * weights).sum(), [xs])
    _compare("output", found, wanted.detach(), "the layer has for all steps at once")
    _compare("gradient of the input", dxs, grad, "the layer has for all steps at once")


def _compare(what: str, found: Tensor, wanted: Tensor, whose: str = "the layer") -> None:
    if not torch.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise StepError(f"the recorded step has another {what} than {whose}")


def run_step(
    step: NeuronStep, xs: Tensor, p: Sequence[Tensor], dys: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The recorded step over a sequence xs [T, ...], in plain torch: outputs, and for the cotangents dys the gradients
    of xs and, element by element, of p."""
    states: list[tuple[Tensor, ...]] = [()]
    ys: list[Tensor] = []
    for t, x in enumerate(xs):
        *s, y = evaluate((step.next if t else step.first).forward, (x, *p, *states[-1]))
        states.append(tuple(s))
        ys.append(y)
    ds: list[Tensor | None] = [torch.zeros_like(xs[0])] * step.states
    dxs: list[Tensor] = []
    dps = [torch.zeros_like(xs[0]) for _ in p]
    for t in reversed(range(len(xs))):
        dx, *grads = evaluate((step.next if t else step.first).backward, (xs[t], *p, *states[t], *ds, dys[t]))
        dxs.append(torch.zeros_like(xs[t]) if dx is None else dx)
        for total, own in zip(dps, grads[: len(p)], strict=True):
            total += 0 if own is None else own
        ds = [torch.zeros_like(xs[0]) if item is None else item for item in grads[len(p) :]]
    return torch.stack(ys), torch.stack(dxs[::-1]), tuple(dps)


def evaluate(graph: fx.Graph, args: Sequence[Any]) -> tuple[Any, ...]:
    """What a recorded graph gives for these tensors."""
    values: dict[fx.Node, Any] = {}
    given = iter(args)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = torch.tensor(node.meta["constant"])
        elif node.op == "output":
            return tuple(fx.node.map_arg(node.args[0], values.__getitem__))  # type: ignore[arg-type]
        else:
            values[node] = node.target(*fx.node.map_arg(node.args, values.__getitem__), **node.kwargs)  # type: ignore[operator, misc]
    raise AssertionError("a graph without output")
