"""The domains by which values travel as bits, checked on what the network computes for the example.

`analyze-domain` proves them from what operations and neuron layers promise; a layer that breaks its promise would be
sent as other numbers, silently. So whatever a program packs is looked at once, for real.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from snnpart import facts, ops
from snnpart.bits import states_of
from snnpart.errors import VerifyError
from snnpart.facts import Domain
from snnpart.gate.observe import Observed, Watch, arguments, copies, same_random_numbers
from snnpart.ops_time import all_nodes
from snnpart.program import CompiledProgram


def packs(compiled: CompiledProgram) -> bool:
    """Whether some value of the program travels as bits."""
    return any(
        node.target is ops.all_gather and ops.gather_options(node)[0] is not None
        for program in compiled.stages.values()
        for node in all_nodes(program.graph)
    )


def check_domains(compiled: CompiledProgram, inputs: Any) -> None:
    """Run the traced network on the example and look at every value that could be packed.

    Raises:
        VerifyError: a value lies outside its domain; it names the node.
    """
    graph = compiled.source

    class Check(Watch):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                _check(n, value)
            return value

    body, _ = copies(graph)
    with same_random_numbers(inputs), torch.no_grad():
        Check(body, graph, Observed()).run(*arguments(graph, inputs))


def _check(node: fx.Node, value: Tensor) -> None:
    domain = facts.get(node, Domain)
    states = states_of(domain, value.dtype)
    if states is None or value.dtype is torch.bool or not value.numel():
        return
    low, high = states[0], states[0] + states[1] - 1
    wrong = (value < low) | (value > high) | (value != value.round())
    if bool(wrong.any()):
        raise VerifyError(
            f"it holds {value[wrong][0].item()}, which its domain [{low}, {high}] does not: it would be sent wrongly",
            where=facts.place(node),
            fix="report it with the neuron layer or operation; its adapter states what it emits",
        )
