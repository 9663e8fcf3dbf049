"""Measured times of kernels: one entry for equal layers, used for costs, and data that all ranks can share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from snnpart import facts
from snnpart.api import parallelize
from snnpart.costs import CPU, MachineProfile
from snnpart.facts import Cost
from snnpart.measure import measure_kernels
from snnpart.passes.analyze.kernels import key_of, scales_of
from tests.lowering import Loop, Residual


def test_equal_layers_share_an_entry_and_every_operation_has_one() -> None:
    x = torch.rand(2, 2, 6, 6)
    source = parallelize(Residual(blocks=3), example_inputs=x, verify="off").compiled.source
    kernels = measure_kernels(source, x, rounds=1)
    keys = {node: key_of(node, source) for node in source.graph.nodes if node.op.startswith("call")}
    assert set(keys.values()) == set(kernels)
    convolutions = [key for node, key in keys.items() if node.target is torch.conv2d]
    assert len(convolutions) == 7 and len(set(convolutions)) == 3  # stem, into the block, out of it
    assert all(forward > 0 for forward, _ in kernels.values())
    assert all(kernels[key][1] > 0 for key in convolutions)


def test_a_loop_over_time_is_measured_as_one() -> None:
    source = parallelize(Loop(), example_inputs=torch.rand(2, 3, 4), verify="off").compiled.source
    kernels = measure_kernels(source, torch.rand(2, 3, 4), rounds=1)
    (loop,) = [node for node in source.graph.nodes if getattr(node.target, "__name__", "") == "loop"]
    assert key_of(loop, source).startswith("loop 3 ")
    assert kernels[key_of(loop, source)][1] > 0


def test_the_profile_is_data_and_its_times_are_the_costs() -> None:
    x = torch.rand(2, 2, 6, 6)
    program = parallelize(Residual(), example_inputs=x, verify="off", profile=CPU)
    profile = program.measured_profile()
    assert profile.name.startswith("cpu-2core and ")
    assert MachineProfile.from_json(profile.to_json()) == profile
    source = parallelize(Residual(), example_inputs=x, verify="off", profile=profile).compiled.source
    for node in source.graph.nodes:
        if node.op.startswith("call") and (cost := facts.get(node, Cost)) is not None:
            assert (cost.forward_us, cost.backward_us) == profile.kernels[key_of(node, source)]


def test_what_was_not_measured_is_scaled_as_its_kind() -> None:
    """Another batch: the roofline's times, as far off as the measured convolutions were."""
    source = parallelize(Residual(), example_inputs=torch.rand(2, 2, 6, 6), verify="off", profile=CPU).compiled.source
    convolutions = {n: facts.need(n, Cost) for n in source.graph.nodes if n.target is torch.conv2d}
    slow = {key_of(n, source): (10 * cost.forward_us, 5 * cost.backward_us) for n, cost in convolutions.items()}
    assert scales_of(source, slow) == {"conv": (pytest.approx(10), pytest.approx(5))}
    costs = []
    for profile in (CPU, replace(CPU, scales=scales_of(source, slow))):
        again = parallelize(Residual(), example_inputs=torch.rand(4, 2, 6, 6), verify="off", profile=profile)
        costs.append([(n.target, c) for n in again.compiled.source.graph.nodes if (c := facts.get(n, Cost))])
    for (target, usual), (_, scaled) in zip(*costs, strict=True):
        there, back = (10, 5) if target is torch.conv2d else (1, 1)
        assert scaled.forward_us == pytest.approx(there * usual.forward_us)
        assert scaled.backward_us == pytest.approx(back * usual.backward_us)


def test_neurons_that_run_fused_do_not_take_the_times_of_layers() -> None:
    """They are measured as the layers they are, in launches of their own, and run in one kernel."""
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    layer = pytest.importorskip("spikingjelly.activation_based.layer")
    module = nn.Sequential(layer.Linear(6, 6, step_mode="m"), neuron.LIFNode(step_mode="m"))
    given = {"example_inputs": torch.rand(8, 2, 6), "input_layout": "TNF", "verify": "off"}
    profile = parallelize(module, profile=CPU, **given).measured_profile()
    other = replace(profile, kernels={})  # of which scales are left

    def costs(profile: MachineProfile, fuse: bool) -> dict[str, Cost]:
        source = parallelize(module, profile=profile, fuse=fuse, **given).compiled.source
        calls = {
            "neuron" if n.op == "call_module" else "linear": n
            for n in source.graph.nodes
            if n.target in ("1", F.linear)
        }
        return {name: facts.need(node, Cost) for name, node in calls.items()}

    for found in (costs(profile, True), costs(other, True)):
        assert found["neuron"] == costs(CPU, True)["neuron"]
        assert found["linear"] != costs(CPU, True)["linear"]
    assert costs(profile, False)["neuron"] != costs(CPU, False)["neuron"]


def test_measured_times_move_the_cut() -> None:
    """A head that takes as long as all the rest is a stage of its own."""
    x = torch.rand(2, 2, 6, 6)
    source = parallelize(Residual(), example_inputs=x, verify="off", profile=CPU).compiled.source
    kernels = {key_of(n, source): (1.0, 1.0) for n in source.graph.nodes if facts.get(n, Cost) is not None}
    head = next(key for key in kernels if key.startswith("linear"))
    profile = replace(CPU, kernels=kernels | {head: (1e6, 1e6)})
    plan = parallelize(Residual(), pp=2, example_inputs=x, verify="off", profile=profile).plan
    assert plan.stages["head"] == 1 and plan.stages["blocks.1"] == 0
