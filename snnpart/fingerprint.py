"""Fingerprints: short texts that are equal for equal programs, on any rank, in any process and after loading.

What is compared is printed form: graphs, slices, ports and schedule. Addresses of objects in it are blotted out.
"""

from __future__ import annotations

import hashlib
import re

import torch
from torch import Tensor, fx

import snnpart
from snnpart.program import CompiledProgram, StageProgram

_ADDRESS = re.compile(r"0x[0-9a-f]+")


def fingerprint(compiled: CompiledProgram) -> dict[str, str]:
    """The parts that make up a program, by what they are called in messages: plan, stage graphs, schedule, versions."""
    stages = "\n".join(_stage_text(stage) for _, stage in sorted(compiled.stages.items()))
    schedule = "\n".join(" ".join(map(str, actions)) for _, actions in sorted(compiled.schedule.items()))
    return {
        "plan": compiled.plan.fingerprint,
        "stage graphs": short_hash(stages),
        "schedule": short_hash(schedule),
        "snnpart version": snnpart.__version__,
        "torch version": torch.__version__.split("+")[0],
    }


def digest(x: Tensor) -> str:
    """Hash of dtype, shape and every bit of a tensor."""
    raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{x.dtype} {tuple(x.shape)} ".encode() + raw).hexdigest()


def short_hash(text: str) -> str:
    """Twelve hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _stage_text(stage: StageProgram) -> str:
    lines = [
        f"stage {stage.stage} tp {stage.tp_rank}",
        *(_node_text(node) for graph in stage.graphs for node in graph.nodes),
    ]
    lines += [repr(item) for item in (*stage.tensors, *stage.receives, *stage.sends)]
    return _ADDRESS.sub("0x", "\n".join(lines))


def _node_text(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else torch.typename(node.target)
    return f"{node.name} {node.op} {target} {node.args} {node.kwargs}"
