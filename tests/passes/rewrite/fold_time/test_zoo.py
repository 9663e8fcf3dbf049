"""The zoo's networks with a loop over time, folded for several numbers of steps, against the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart.frameworks import reset_state
from tests import zoo_models as models
from tests.passes.rewrite.fold_time.parity import check, repeated
from tests.zoo import ZOO, Model

STEPS = (1, 2, 5, 25)
ENOUGH = 5
"""Steps in which every neuron layer can fire."""

BY_STEPS: dict[str, Callable[[int], nn.Module]] = {
    "snntorch_leaky": models.leaky_loop,
    "snntorch_synaptic": models.synaptic_loop,
    "snntorch_alpha": models.alpha_loop,
    "snntorch_sconv2dlstm": models.sconv2dlstm_loop,
    "norse_sequential": models.norse_sequential,
    "handwritten_lif": models.HandWritten,
    "unet": models.UNet,
}
"""Networks whose number of steps is their own; that of the others lies in their input, or is the caller's."""

OVER_FRAMES = ("snntorch_rleaky", "norse_lsnn", "recurrent", "tied")
RECURRENT = ("snntorch_rleaky", "snntorch_sconv2dlstm", "norse_lsnn", "recurrent")


def _loops() -> list[Any]:
    found = {name: name in BY_STEPS or name in OVER_FRAMES or model.steps is not None for name, model in ZOO.items()}
    marks = {name: [pytest.mark.all] if ZOO[name].slow else [] for name in ZOO}
    return [pytest.param(name, marks=marks[name]) for name, loops in found.items() if loops]


def over(name: str, steps: int) -> Model:
    """The zoo's network over so many steps."""
    model = ZOO[name]
    if name in BY_STEPS:
        return replace(model, factory=lambda: BY_STEPS[name](steps))
    shapes = model.shapes
    if model.time_dim is not None:
        dim = model.time_dim
        shapes = tuple((*shape[:dim], steps, *shape[dim + 1 :]) for shape in shapes)
    return replace(model, shapes=shapes, steps=None if model.steps is None else steps)


def build(name: str, steps: int) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The network, active over at least `ENOUGH` steps, inputs of `steps`, and where their dims are."""
    known, _ = over(name, max(steps, ENOUGH)).build()
    model = over(name, steps)
    module = model.factory().to(model.dtype).train()
    module.load_state_dict(known.state_dict())
    reset_state(module)
    return module, model.inputs(), model.dims


@cache
def folded(name: str, steps: int) -> tuple[int, list[str]]:
    """How many nodes the folded graph has, which computes what the network computes, and its repeated layers."""
    module, inputs, dims = build(name, steps)
    torch.manual_seed(0)
    graph = check(module, inputs, fires=steps >= ENOUGH, **dims)
    return len(graph.graph.nodes), repeated(graph)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", _loops())
def test_folded_computes_what_the_loop_computes(name: str, steps: int) -> None:
    _, again = folded(name, steps)
    assert again == [] or name in RECURRENT


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", _loops())
def test_the_size_does_not_depend_on_the_number_of_steps(name: str) -> None:
    assert folded(name, 5)[0] == folded(name, 25)[0]
