"""Networks of every framework on real process groups: loss, gradients, statistics and outputs of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from snnpart.frameworks import adapter_for, reset_state
from tests.distributed.jobs import ramp, without_dropout
from tests.distributed.pool import Pool
from tests.distributed.reference import OneProcess, assert_same
from tests.zoo import ZOO
from tools.zoo.check import told


def is_neuron_state(module: nn.Module, key: str) -> bool:
    """Whether the key of the state_dict is a membrane, which is whatever the last call left."""
    path, _, name = key.rpartition(".")
    return name in module.get_submodule(path)._buffers and adapter_for(module.get_submodule(path)).is_neuron(
        module.get_submodule(path)
    )


RUNS: list[tuple[str, int, dict[str, Any]]] = [
    ("small_sew-m", 4, {"tp": 2, "pp": 2, "microbatches": 2}),
    ("small_sew-m", 2, {"dp": "fsdp2", "microbatches": 2}),
    ("small_sew-s", 4, {"pp": 2, "dp": "ddp", "microbatches": 2}),
    ("plif_mnist-m", 2, {"tp": 2, "microbatches": 2}),
    ("plif_mnist-m", 4, {"tp": 2, "dp": "fsdp2"}),
    ("plif_mnist-m", 2, {"dp": "ddp"}),
    ("spikformer", 4, {"tp": 2, "pp": 2}),
    ("snntorch_leaky", 4, {"tp": 2, "pp": 2, "microbatches": 2}),
    ("snntorch_rleaky", 2, {"dp": "fsdp2"}),
    ("snntorch_hidden", 2, {"pp": 2, "microbatches": 2}),
    ("norse_lsnn", 2, {"dp": "fsdp2"}),
    ("norse_sequential", 2, {"tp": 2}),
    ("sinabs_layers", 2, {"pp": 2, "microbatches": 2}),
    ("sinabs_from_model", 2, {"tp": 2}),
    ("sinabs_from_model", 2, {"pp": 2, "microbatches": 2}),
    ("tied", 2, {"dp": "fsdp2"}),
    ("tied", 4, {"pp": 2, "tp": 2, "microbatches": 2}),
    ("recurrent", 4, {"pp": 2, "tp": 2, "microbatches": 2}),
    ("unet", 4, {"pp": 2, "dp": "ddp"}),
    ("small_sew-m", 2, {"pp": 2, "schedule": "zbv", "microbatches": 2}),
    ("small_sew-s", 4, {"pp": 2, "dp": "ddp", "schedule": "interleaved-1f1b", "microbatches": 2}),
    ("plif_mnist-m", 2, {"pp": 2, "schedule": "interleaved-zb", "microbatches": 2}),
    ("spikformer", 4, {"tp": 2, "pp": 2, "schedule": "zbv", "microbatches": 2}),
    ("unet", 2, {"pp": 2, "schedule": "zbv", "microbatches": 2}),
]


SHARDED = (
    "small_sew-m", "ms_resnet", "plif_mnist-m", "spiking_vgg11_bn-m", "spikformer", "qkformer",
    "spike_driven_transformer", "snntorch_leaky", "snntorch_rleaky", "norse_sequential", "norse_lsnn",
    "handwritten_lif", "unet", "recurrent", "tied",
)  # fmt: skip


@pytest.mark.all
@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("name", [name for name in SHARDED if name in ZOO])
def test_two_optimizer_steps_over_tp_ranks(pool: Pool, name: str, tp: int) -> None:
    """Losses, outputs, parameters and statistics after two steps of SGD with momentum."""
    model = ZOO[name]
    module, _ = model.build()
    without_dropout(module)
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    call = lambda m, x: model.call(told(m, x.shape[model.in_dims]), (x,))  # noqa: E731
    one = OneProcess(module, optimizer=optimizer, reset=reset_state, batch_dim=model.in_dims, call=call)
    batches = [model.inputs(seed=seed)[0] for seed in range(2)]
    losses = [one.train_step([(x, torch.zeros(2))], ramp) for x in batches]
    outputs, state = one.evaluate(batches[0]), module.state_dict()
    job = "tests.distributed.jobs:train_zoo"
    for result in pool.run(job, ranks=tp, timeout=400.0, name=name, tp=tp, microbatches=1):
        assert result["losses"] == pytest.approx(losses, abs=1e-9)
        assert_same(*({k: s[k] for k in state if not is_neuron_state(module, k)} for s in (result["state"], state)))
        for made, right in zip(*map(pytree.tree_leaves, (result["outputs"], outputs)), strict=True):
            torch.testing.assert_close(made, right, rtol=1e-9, atol=1e-9)


UNITS = [
    pytest.param(name, 2, {"dp": "fsdp2", "fsdp_units": 4, "fsdp_reshard": True}, marks=pytest.mark.all)
    for name in SHARDED
    if name in ZOO
]


@pytest.mark.parametrize(
    ("name", "ranks", "how"), [*(run for run in RUNS if run[0] in ZOO), *UNITS], ids=lambda v: str(v).replace(" ", "")
)
def test_one_step_equals_one_process(pool: Pool, name: str, ranks: int, how: dict[str, Any]) -> None:
    """Parameters too: nothing but the gradients may change in a step without an optimizer."""
    model = ZOO[name]
    module, _ = model.build()
    without_dropout(module)
    per_pipeline = how.get("tp", 1) * how.get("pp", 1)
    dp, how = ranks // per_pipeline, {"microbatches": 1, **how}
    one = OneProcess(
        module,
        microbatches=how["microbatches"],
        reset=reset_state,
        batch_dim=model.in_dims,
        call=lambda m, x: model.call(told(m, x.shape[model.in_dims]), (x,)),
    )
    batches = [model.inputs(seed=rank)[0] for rank in range(dp)]
    loss = one.train_step([(x, torch.zeros(2)) for x in batches], ramp)
    wanted, tolerance = one.gradients(), 1e-9 if model.dtype is torch.float64 else 1e-5
    outputs = [one.evaluate(x) for x in batches]
    for rank, result in enumerate(pool.run("tests.distributed.jobs:run_zoo", ranks=ranks, name=name, **how)):
        assert result["loss"] == pytest.approx(loss, abs=tolerance * max(1.0, abs(loss)))
        assert_same(result["gradients"], wanted, tolerance)
        state = module.state_dict()
        assert sorted(result["state"]) == sorted(state)
        assert_same(
            *({key: s[key] for key in state if not is_neuron_state(module, key)} for s in (result["state"], state))
        )
        pairs = zip(
            pytree.tree_leaves(result["outputs"]), pytree.tree_leaves(outputs[rank // per_pipeline]), strict=True
        )
        for made, right in pairs:
            torch.testing.assert_close(made, right, rtol=tolerance, atol=tolerance)
