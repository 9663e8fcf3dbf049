"""Runs a traced graph beside the module it was traced from, on copies, and compares everything."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart.frameworks import clone_leaf, reset_state
from snnpart.graph import BATCH_SIZE, TRAINING, Body, SpikeGraph
from snnpart.layout import tensor_leaves
from snnpart.trace import trace
from snnpart.verify import verify

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def body_of(graph: SpikeGraph) -> tuple[Body, dict[str, Tensor]]:
    """A body that owns copies of the graph's tensors and leaves; the copies by name, those inside leaves too."""
    copies = {name: info.tensor.detach().clone() for name, info in graph.tensors.items()}
    for name, info in graph.tensors.items():
        copies[name].requires_grad_(info.tensor.requires_grad)
        if info.kind == "parameter":
            copies[name] = nn.Parameter(copies[name], info.tensor.requires_grad)
    leaves = {}
    for path, leaf in graph.leaves.items():
        own = {
            known[len(path) + 1 :]: copies[name]
            for name, info in graph.tensors.items()
            if info.leaf == path
            for known in (name, *info.aliases)
            if known.startswith(f"{path}.")
        }
        leaves[path] = clone_leaf(leaf.module, own)
    plain = {name: (info.kind, copies[name]) for name, info in graph.tensors.items() if info.leaf is None}
    return Body(plain, leaves), copies


def run_graph(graph: SpikeGraph, inputs: Any, training: bool) -> tuple[Any, dict[str, Tensor]]:
    """The graph's result in the user's structure, and the copies of tensors it used."""
    body, copies = body_of(graph)
    body.train(training)
    assert getattr(body, TRAINING) is training
    arguments: list[Any] = list(tensor_leaves(inputs))
    if any(node.op == "placeholder" and node.target == BATCH_SIZE for node in graph.graph.nodes):
        dim = next(info.batch_dim for info in graph.inputs if info.batch_dim is not None)
        arguments.append(arguments[0].shape[dim])
    flat = iter(body.bind(graph.graph)(*arguments))
    leaves = [
        graph.out_constants[i] if i in graph.out_constants else next(flat) for i in range(graph.out_spec.num_leaves)
    ]
    return pytree.tree_unflatten(leaves, graph.out_spec), copies


def loss_of(out: Any) -> Tensor:
    """A number that depends on every element of every output that carries a gradient, each with another weight."""
    total = torch.zeros((), dtype=torch.float64)
    for k, leaf in enumerate(tensor_leaves(out)):
        if leaf.requires_grad:
            weights = torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype) * 0.7 + k).reshape(leaf.shape)
            total = total + (leaf * weights).sum()
    return total


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def steps(model: nn.Module, inputs: Any, count: int | None, time_dim: int | None) -> Any:
    """The module's result, called once or `count` times with its outputs stacked."""
    if count is None:
        return call(model, inputs)
    pick = (lambda x, t: x) if time_dim is None else (lambda x, t: x.select(time_dim, t))
    outs = [call(model, pytree.tree_map(lambda x: pick(x, t), inputs)) for t in range(count)]
    return pytree.tree_map(lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *outs)


def compare(graph: SpikeGraph, model: nn.Module, inputs: Any, training: bool, reset: Any = None, seed: int = 3) -> None:
    """Graph and module on the same inputs: outputs, the gradient of every tensor, buffers."""
    reference = model
    reset_state(reference, reset)
    reference.train(training)
    buffers = {name: buffer.clone() for name, buffer in reference.named_buffers()}
    tensors = {name: info.tensor for name, info in graph.tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    torch.manual_seed(seed)
    out, copies = run_graph(graph, inputs, training)
    loss = loss_of(out)
    if loss.requires_grad:
        loss.backward()
    torch.manual_seed(seed)
    time = next((info.time_dim for info in graph.inputs), None)
    expected = steps(reference, inputs, graph.time_steps, time)
    loss = loss_of(expected)
    if loss.requires_grad:
        loss.backward()
    same_structure(out, expected)
    for name, info in graph.tensors.items():
        same(f"gradient of {name}", copies[name].grad, tensors[name].grad)
        if info.kind == "buffer" and info.persistent and name not in graph.window_buffers():
            now = dict(reference.named_buffers())[name]
            if info.leaf is None or now.shape == buffers[name].shape:  # a neuron's state takes the shape of its input
                same(f"buffer {name}", copies[name], now)
    reset_state(reference, reset)
    for name, buffer in reference.named_buffers():
        if buffer.shape == buffers[name].shape:
            buffer.detach().copy_(buffers[name])


def same_structure(out: Any, expected: Any) -> None:
    ours, theirs = pytree.tree_flatten(out), pytree.tree_flatten(expected)
    assert ours[1] == theirs[1]
    for k, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        if isinstance(b, Tensor):
            same(f"output {k}", a, b)
        else:
            assert a == b or (a is None and b is None)


def same(what: str, a: Tensor | None, b: Tensor | None) -> None:
    assert (a is None) == (b is None), f"{what}: {a} against {b}"
    if a is not None and b is not None:
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype} against {b.shape} {b.dtype}"
        tolerance = TOLERANCE.get(b.dtype, 0.0)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def check(model: nn.Module, inputs: Any, *, others: Any = None, training: bool = True, **options: Any) -> SpikeGraph:
    """Trace, check the IR's rules, compare in the traced mode (and in the other, where the graph holds for both).

    `others` are inputs with another batch size that the same graph must serve.
    """
    before = snapshot(model)
    graph = trace(model, inputs, training=training, **options)
    assert snapshot(model) == before, "tracing changed the model"
    verify(graph)
    reset = options.get("reset")
    for mode in (training,) if graph.training_specialised else (True, False):
        compare(graph, model, inputs, mode, reset)
        if others is not None:
            assert not graph.batch_fixed, graph.batch_fixed
            compare(graph, model, others, mode, reset)
    model.train(training)
    return graph


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of the modules that can be compared: identities of attributes, versions and flags of tensors."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            held = dict(value) if isinstance(value, dict) else list(value) if isinstance(value, (list, set)) else value
            found[f"{path}:{name}"] = (id(value), repr(copy.copy(held)) if not isinstance(held, Tensor) else id(held))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"{name}:tensor"] = (id(tensor), tensor._version, tensor.requires_grad, id(tensor.grad))
    return found
