"""Fingerprints: do all ranks run the same program, and from the same weights?

Compared before the first collective of a program. Different plans or graphs would end in a send that nobody receives;
different versions of torch may; those are errors. Different weights (an unseeded initialisation on every rank) are not:
rank 0's are taken, as DDP does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

import snnpart
from snnpart.errors import LaunchError
from snnpart.program import CompiledProgram, StageProgram
from snnpart.runtime.ranks import Ranks

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def fingerprint(compiled: CompiledProgram) -> dict[str, str]:
    """What must be equal on all ranks, by what it is called in messages."""
    stages = "\n".join(_stage_text(stage) for _, stage in sorted(compiled.stages.items()))
    schedule = "\n".join(" ".join(map(str, actions)) for _, actions in sorted(compiled.schedule.items()))
    return {
        "plan": compiled.plan.fingerprint,
        "stage graphs": _hash(stages),
        "schedule": _hash(schedule),
        "snnpart version": snnpart.__version__,
        "torch version": torch.__version__.split("+")[0],
    }


def check_fingerprints(compiled: CompiledProgram, ranks: Ranks) -> None:
    """LaunchError on every rank when the programs differ, naming the ranks that differ from rank 0. Collective."""
    everyone = ranks.gather(fingerprint(compiled))
    for what, value in everyone[0].items():
        differ = [rank for rank, other in enumerate(everyone) if other[what] != value]
        if differ:
            raise LaunchError(
                f"the {what} of rank {', '.join(map(str, differ))} differs from that of rank 0: "
                f"{everyone[differ[0]][what]} instead of {value}",
                fix="start the same code with the same arguments on every rank; give plan= to fix the decisions",
            )


def agree_on_values(values: Mapping[str, Tensor], ranks: Ranks) -> tuple[dict[str, Tensor], bool]:
    """The tensors that all ranks start from, and whether they had to be taken from rank 0. Collective."""
    digests = ranks.gather(_hash("".join(f"{name} {digest(x)}\n" for name, x in values.items())))
    if len(set(digests)) == 1:
        return dict(values), False
    common = {name: x.detach().to(ranks.device, copy=True).contiguous() for name, x in values.items()}
    for tensor in common.values():
        ranks.broadcast(tensor, ranks.world, 0)
    return common, True


def digest(x: Tensor) -> str:
    """Hash of dtype, shape and every bit of a tensor."""
    raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{x.dtype} {tuple(x.shape)} ".encode() + raw).hexdigest()


def _stage_text(stage: StageProgram) -> str:
    lines: list[Sequence[object] | str] = [f"stage {stage.stage} tp {stage.tp_rank}"]
    lines += [_node_text(node) for node in stage.graph.nodes]
    lines += [_ADDRESS.sub("0x", repr((*stage.tensors, *stage.receives, *stage.sends)))]
    return "\n".join(map(str, lines))


def _node_text(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else torch.typename(node.target)
    return _ADDRESS.sub("0x", f"{node.name} {node.op} {target} {node.args} {node.kwargs}")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
