"""Run the user's module, or its graph, once forward and backward, and keep what it computed.

The module runs inside `preserved`, in the mode that was traced, after a reset; the graph runs over a `Body` of copies.
Gradients are taken with `autograd.grad`, which leaves every `.grad` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from snnpart import facts, hooks
from snnpart.errors import SnnpartError, VerifyError
from snnpart.frameworks import clone_leaf, preserved, reset_state
from snnpart.graph import BATCH_SIZE, Body, SpikeGraph
from snnpart.ops import Surrogate
from snnpart.seeded import seeded
from snnpart.trace import places

Reset = Callable[[nn.Module], Any]
_SEED = 0


@dataclass
class Observed:
    """What one run computed.

    `outputs` are the tensor outputs in order, `gradients` those of all parameters by the user's names (None: unused),
    `buffers` their values after forward, without those that hold the state of one window. `differentiable` is False for
    a module in eval mode whose own backward fails (code after the network that decodes in place), so that there are no
    gradients to compare. `spikes` holds for each neuron layer which outputs of each call were not zero.
    """

    outputs: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    spikes: dict[str, list[Tensor]] = field(default_factory=dict)
    structure: Any = None
    differentiable: bool = True

    def rate(self, layer: str) -> float:
        """The share of non-zero outputs of a neuron layer over all its calls."""
        masks = self.spikes[layer]
        return sum(int(mask.sum()) for mask in masks) / max(sum(mask.numel() for mask in masks), 1)


class _BackwardFailed(RuntimeError):
    """Autograd cannot go back through what was run."""


@contextmanager
def same_random_numbers(inputs: Any) -> Iterator[None]:
    """Run the block with one fixed seed, and put the caller's random numbers back."""
    with seeded(_SEED, inputs), torch.enable_grad():
        yield


def observe_module(model: nn.Module, graph: SpikeGraph, inputs: Any, reset: Reset | None = None) -> Observed:
    """What the user's module computes for `inputs`; the module is left as it was."""
    seen = Observed()
    with preserved(model), same_random_numbers(inputs):
        reset_state(model, reset, graph.window_buffers())
        set_mode(model, graph.traced_training)
        handles = [
            leaf.module.register_forward_hook(_note_spikes(seen, path))
            for path, leaf in graph.leaves.items()
            if leaf.neuron
        ]
        try:
            result = call_module(model, graph, inputs)
            seen.structure = pytree.tree_structure(result)
            own = {name: info.tensor for name, info in graph.tensors.items()}
            _finish(seen, pytree.tree_leaves(result), own, model, graph)
        except _BackwardFailed as error:
            if graph.traced_training:
                raise VerifyError(
                    f"backward of the module itself fails for the example inputs: {error}",
                    where=graph.name,
                    fix='mend the module first, or compile with verify="off"',
                ) from error
            seen.differentiable, seen.gradients = False, {}
        finally:
            for handle in handles:
                handle.remove()
    return seen


def set_mode(model: nn.Module, training: bool) -> None:
    """Put the model into the mode; modules that the user froze in another mode than the model keep theirs."""
    if model.training == training:
        return
    frozen = [(module, module.training) for module in model.modules() if module.training != model.training]
    model.train(training)
    for module, mode in frozen:
        module.training = mode


def _note_spikes(seen: Observed, path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        first = next((t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)), None)
        if first is not None:
            seen.spikes.setdefault(path, []).append(first.detach() != 0)

    return hook


def call_module(model: nn.Module, graph: SpikeGraph, inputs: Any) -> Any:
    """The reference: one call, or with `time_steps` T calls whose outputs are stacked over T at dim 0."""
    inputs = pytree.tree_map(lambda x: _own_copy(x) if isinstance(x, Tensor) else x, inputs)
    if graph.time_steps is None:
        return _call(model, inputs)
    leaves, spec = pytree.tree_flatten(inputs)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    timed = {i: info.time_dim for i, info in zip(positions, graph.inputs) if info.time_dim is not None}
    steps = []
    for t in range(graph.time_steps):
        now = [leaf.select(timed[i], t) if i in timed else leaf for i, leaf in enumerate(leaves)]
        steps.append(_call(model, pytree.tree_unflatten(now, spec)))
    return pytree.tree_map(lambda *values: torch.stack(values) if isinstance(values[0], Tensor) else values[-1], *steps)


def _own_copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    try:
        return model(*(args if isinstance(args, (tuple, list)) else (args,)), **kwargs)
    except SnnpartError:
        raise
    except Exception as error:  # a layer that stays whole is first run here: the tracer may know what it returns
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None
        raise VerifyError(
            f"the module itself fails for the example inputs: {type(error).__name__}: {error}",
            where=places.describe(places.raised_at("", below)),
            fix='mend the module first, or compile with verify="off"',
        ) from error


def copies(graph: SpikeGraph) -> tuple[Body, dict[str, Tensor]]:
    """A body with its own copy of every tensor and leaf of the graph, and those tensors by name."""
    tensors: dict[str, Tensor] = {}
    inside: dict[str, dict[str, Tensor]] = {path: {} for path in graph.leaves}
    for name, info in graph.tensors.items():
        tensor = info.tensor.detach().clone()
        tensors[name] = (
            nn.Parameter(tensor, requires_grad=info.tensor.requires_grad) if info.kind == "parameter" else tensor
        )
        if info.leaf is None:
            hooks.carry(info.tensor, tensors[name])
        for alias in (name, *info.aliases):
            for path, held in inside.items():
                if alias.startswith(path + "."):
                    held[alias[len(path) + 1 :]] = tensors[name]
    leaves = {path: clone_leaf(leaf.module, inside[path]) for path, leaf in graph.leaves.items()}
    free = {name: (info.kind, tensors[name]) for name, info in graph.tensors.items() if info.leaf is None}
    body = Body(free, leaves)
    body.train(graph.traced_training)
    return body, tensors


def arguments(graph: SpikeGraph, inputs: Any) -> list[Any]:
    """The values of the graph's placeholders for the user's inputs."""
    tensors = [_own_copy(x) for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]
    sizes = [x.shape[i.batch_dim] for x, i in zip(tensors, graph.inputs, strict=True) if i.batch_dim is not None]
    wanted = [node for node in graph.graph.nodes if node.op == "placeholder"]
    needs_size = bool(wanted) and wanted[-1].target == BATCH_SIZE
    return [*tensors, *([sizes[0] if sizes else graph.batch] if needs_size else [])]


class Watch(fx.Interpreter):
    """Runs a graph node by node over a body and notes which outputs of each neuron layer are not zero."""

    def __init__(self, body: Body, graph: SpikeGraph, seen: Observed) -> None:
        super().__init__(body, graph=graph.graph)
        self.source, self.source_body, self.seen = graph, body, seen
        self.extra_traceback = False

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function, or a loop over the body's leaves."""
        return super().call_function(self.source_body.bound(target), args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        layer = _layer(n, self.source)
        first = next((t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)), None) if layer else None
        if first is not None:
            self.seen.spikes.setdefault(layer, []).append(first.detach() != 0)
        return value


def _layer(node: fx.Node, graph: SpikeGraph) -> str:
    """The name of the neuron layer the node computes, or ''."""
    if node.op == "call_module":
        path = str(node.target)
        return path if graph.leaves[path].neuron else ""
    if isinstance(node.target, Surrogate):
        return facts.origin(node).module or node.target.function.__qualname__
    return ""


def observe_graph(graph: SpikeGraph, inputs: Any) -> Observed:
    """What the graph computes for `inputs`, over copies of all tensors and leaves."""
    seen = Observed(structure=graph.out_spec)
    body, tensors = copies(graph)
    with same_random_numbers(inputs):
        outputs = Watch(body, graph, seen).run(*arguments(graph, inputs))
        _finish(seen, outputs, tensors, body, graph)
    return seen


def _finish(
    seen: Observed, outputs: Sequence[Any], tensors: Mapping[str, Tensor], module: nn.Module, graph: SpikeGraph
) -> None:
    """Note outputs, the buffers that `module` holds now, and the gradients that a fixed cotangent gives."""
    made = [value for value in outputs if isinstance(value, Tensor)]
    seen.outputs = [value.detach().clone() for value in made]
    held = dict(module.named_buffers(remove_duplicate=False))
    stored = held.keys() - graph.window_buffers()
    buffers = [name for name, info in graph.tensors.items() if info.kind == "buffer" and name in stored]
    seen.buffers = {name: held[name].detach().clone() for name in buffers}
    wanted = {n: t for n, t in tensors.items() if graph.tensors[n].kind == "parameter" and t.requires_grad}
    roots = [value for value in made if value.requires_grad]
    if not roots or not wanted:
        seen.gradients = dict.fromkeys(wanted)
        return
    into = [cotangent(value, at) for at, value in enumerate(roots)]
    try:
        found = torch.autograd.grad(roots, list(wanted.values()), into, allow_unused=True)
    except RuntimeError as error:
        raise _BackwardFailed(str(error).partition("\n")[0]) from error
    seen.gradients = dict(zip(wanted, found, strict=True))


def cotangent(value: Tensor, position: int) -> Tensor:
    """The fixed random gradient that is fed into output number `position` among those with a gradient."""
    generator = torch.Generator().manual_seed(1 + position)
    return torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)
