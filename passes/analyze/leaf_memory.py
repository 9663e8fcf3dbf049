"""What a neuron layer holds, found out by running it: its code is a framework's, and the versions differ.

A copy runs on one sample, forward and backward, while the bytes of living tensors are counted; height and width shrink
to 1, as a layer does the same for each of their places. It runs on a GPU where the network is on one or the process has
begun to use one, since frameworks have other code there; compiling begins no use of CUDA, after which a process cannot
be forked. A layer that does not run so counts as keeping its input and its membrane before and after the spike; a GPU
that is full is an error, as other facts than those of the other ranks would give another plan.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from snnpart import facts, frameworks
from snnpart.compat import MODULE_HOOKS
from snnpart.facts import LeafMemory, Value
from snnpart.graph import SpikeGraph
from snnpart.live_bytes import LiveBytes
from snnpart.ops_time import Loop
from snnpart.passes.analyze.kinds import value_of

Known = dict[Hashable, LeafMemory]


def put_leaf_memory(graph: SpikeGraph) -> None:
    """Write `LeafMemory` on every call of a layer that is kept whole, also in loops."""
    known: Known = {}
    bodies = [node.target.body for node in graph.graph.nodes if isinstance(node.target, Loop)]
    for nodes in (graph.graph.nodes, *(body.nodes for body in bodies)):
        for node in nodes:
            if node.op == "call_module":
                facts.put(node, leaf_memory(node, graph, known))


def leaf_memory(node: fx.Node, graph: SpikeGraph, known: Known) -> LeafMemory:
    """What a call of a layer holds; `known` has what was found for layers that are alike."""
    module, value = graph.leaves[str(node.target)].module, value_of(node.args[0]) if node.args else None
    if value is None or not value.requires_grad or len(node.all_input_nodes) != 1:
        return LeafMemory()
    shape = _small(value, graph.batch)
    key = (type(module), repr(module), tuple(_sizes(module)), shape, value.dtype)
    if key not in known:
        known[key] = measured(module, torch.zeros(shape, dtype=value.dtype, device=_device(graph)))
    return known[key]


def _sizes(module: nn.Module) -> list[Hashable]:
    return [(name, tuple(x.shape), x.requires_grad) for name, x in module.named_parameters()]


def _small(value: Value, batch: int) -> tuple[int, ...]:
    """The shape of one sample, height and width 1."""
    shape = value.shape_at(1 - batch)
    return (*shape[:-2], 1, 1) if len(shape) > 3 else shape


def measured(module: nn.Module, x: Tensor) -> LeafMemory:
    """What a copy of the layer holds on this input, on its device; that of most neurons where it does not run."""
    tensors = {name: torch.zeros_like(value, device=x.device) for name, value in _tensors(module)}
    try:
        return _run(_without_hooks(frameworks.clone_leaf(module, tensors), module), x)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the layer's own code, on an input that it was not made for
        return LeafMemory()


def _without_hooks(copy: nn.Module, module: nn.Module) -> nn.Module:
    """The copy without the user's hooks, which would count a call that is none."""
    for name, old in module.named_modules():
        new = vars(copy.get_submodule(name))
        for slot in MODULE_HOOKS:
            new[slot] = OrderedDict((key, hook) for key, hook in new[slot].items() if key not in vars(old)[slot])
    return copy


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _device(graph: SpikeGraph) -> torch.device:
    """The GPU that holds the network, else the one that the process uses, else the CPU."""
    own = next((info.tensor.device for info in graph.tensors.values() if info.tensor.is_cuda), None)
    if own is not None:
        return own
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")


def _run(module: nn.Module, x: Tensor) -> LeafMemory:
    """Forward and backward of the layer."""
    counter = LiveBytes()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([x.device] if x.is_cuda else []))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(counter)
        given = x.requires_grad_().clone()
        outputs = [y for y in pytree.tree_leaves(module.train()(given)) if isinstance(y, Tensor)]
        forward, held = counter.peak, counter.now
        for part in module.modules():
            frameworks.adapter_for(part).reset(part)
        size = given.nbytes
        with_input = counter.now
        del given
        after = counter.now
        made = sum({y.untyped_storage()._cdata: y.untyped_storage().nbytes() for y in outputs}.values())
        own = after - made - (size if after == with_input else 0)
        counter.forget_peak()
        roots = [y for y in outputs if y.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(y) for y in roots])
    unit, state = outputs[0].nbytes, held - with_input
    return LeafMemory(
        own=max(own, 0) / unit,
        state=state / unit,
        forward=max(forward - held, 0) / unit,
        backward=max(counter.peak - after - 2 * unit, 0) / unit,
        keeps_input=after == with_input,
    )
