"""The Plan: every decision of a compilation as data, to print, save, edit and give back (`plan=`).

Decisions are keyed by the user's names, never by node names, so that one plan fits every graph of the same network
(another T, another image size, train and eval mode):

- `shards`: module path (a convolution, a linear, a norm, a neuron layer) -> rule of the sharding table. A path that is
  not listed is replicated or follows its producer, whichever the rule of its operation says.
- `schedule`: "" is filled in at once: 1F1B where there is a microbatch for each rank, else GPipe.
- `stages_per_rank`: pipeline stages of one rank (0: the schedule's own number, filled in at once).
- `memory`: bytes that one rank may take in a training step, under which placement and stages were chosen (0: no limit).
- `batchnorm`: whose statistics BatchNorm takes in training: a microbatch's, the whole batch's ("full"), or those of a
  microbatch over all data-parallel ranks ("sync").
- `fuse`: whether neurons run in kernels of their own on a GPU ("auto": in the fastest way, which is measured there).
- `neuron_dtype`: what fused neurons round states to from step to step, also as "fp32", "bf16", "fp16".
- `numerics`: whether evaluations fold BatchNorm into the layers before it ("fold") or not ("exact").
- `saved`: whether spikes that layers keep for backward are kept as bits ("packed") or as they are ("plain").
- `fold`: steps of a folded time loop that are computed at a time (0: all of them).
- `samples`: of the example batch by which all this was decided (0: not said).
- `tied`: parameters that several stages may hold a copy of, which sum its gradients after each step, and buffers and
  constants that they only read.
- `stages`: module path -> pipeline stage. Covers every module that owns a parameter, buffer or state, and every module
  path whose own operations all lie in one stage. Copies of a tied parameter have names of their own (`decide/tied`).
- `units`, `reshard`: under FSDP2, module path or parameter -> the unit in which it is gathered and its gradient reduced
  (0 where none is named), numbered over all stages in the order in which a forward comes to them; and whether
  parameters are sharded again after forward.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from snnpart import schedules
from snnpart.errors import ConfigError, PlanError

SCHEDULES = schedules.NAMES
DATA_PARALLEL = ("ddp", "fsdp2")
STATE_DTYPES = ("float32", "bfloat16", "float16")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
BATCHNORM = ("microbatch", "full", "sync")
NUMERICS = ("exact", "fold")
SAVED = ("plain", "packed")
FUSE = (True, False, "auto")
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions. Immutable; edit with `dataclasses.replace` or as JSON."""

    tp: int = 1
    pp: int = 1
    dp: str = "ddp"
    schedule: str = ""
    microbatches: int = 1
    stages_per_rank: int = 0
    memory: int = 0
    fuse: bool | str = False
    neuron_dtype: str = "float32"
    channels_last: bool = False
    fold: int = 0
    batchnorm: str = "microbatch"
    reshard: bool = False
    numerics: str = "exact"
    saved: str = "plain"
    samples: int = 0
    tied: tuple[str, ...] = ()
    shards: dict[str, str] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.schedule and self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule!r} is not known", choices=SCHEDULES)
        if self.dp not in DATA_PARALLEL:
            raise ConfigError(f"dp={self.dp!r} is not known", choices=DATA_PARALLEL)
        for name in ("tp", "pp", "microbatches"):
            if not _is_count(getattr(self, name)) or getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not a positive integer")
        for name in ("stages_per_rank", "memory", "fold", "samples"):
            if not _is_count(getattr(self, name)) or getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not a positive integer")
        if self.batchnorm not in BATCHNORM:
            raise ConfigError(f"batchnorm={self.batchnorm!r} is not known", choices=BATCHNORM)
        if self.fuse not in FUSE:
            raise ConfigError(f"fuse={self.fuse!r} is not known", choices=FUSE)
        if self.saved not in SAVED:
            raise ConfigError(f"saved={self.saved!r} is not known", choices=SAVED)
        if self.numerics not in NUMERICS:
            raise ConfigError(f"numerics={self.numerics!r} is not known", choices=NUMERICS)
        object.__setattr__(self, "neuron_dtype", _SHORT.get(self.neuron_dtype, self.neuron_dtype))
        if self.neuron_dtype not in STATE_DTYPES:
            raise ConfigError(f"neuron_dtype={self.neuron_dtype!r} is not known", choices=(*_SHORT, *STATE_DTYPES))
        if not isinstance(self.channels_last, bool):
            raise ConfigError(f"channels_last={self.channels_last!r} is not known", choices=(True, False))
        if isinstance(self.tied, str) or not all(isinstance(name, str) for name in self.tied):
            raise ConfigError(f"tied={self.tied!r} is no list of names", fix="give the names of parameters")
        object.__setattr__(self, "tied", tuple(self.tied))
        object.__setattr__(self, "schedule", self.schedule or schedules.default(self.pp, self.microbatches))
        per_rank = schedules.stages_per_rank(self.schedule, self.pp, self.stages_per_rank)
        object.__setattr__(self, "stages_per_rank", per_rank)
        _check_table("shards", self.shards, lambda rule: isinstance(rule, str), "the rule of a module path, as text")
        _check_table("stages", self.stages, _is_count, "the stage of a module path, as an integer")
        _check_table("units", self.units, _is_count, "the unit of a module path, as an integer")
        bad = {path: stage for path, stage in self.stages.items() if not 0 <= stage < self.stage_count}
        if bad:
            raise PlanError(f"stages {bad} are outside 0..{self.stage_count - 1}", fix="renumber them, or change pp")

    @property
    def stage_count(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""
        return schedules.KINDS[self.schedule].splits and self.pp > 1

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return schedules.rank_of_stage(self.schedule, self.pp, stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in order."""
        return tuple(stage for stage in range(self.stage_count) if self.rank_of(stage) == rank)

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits that are equal for equal plans."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan; ConfigError names a field that is unknown or missing."""
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"the plan is not JSON: {error}", fix="save it with Plan.to_json()") from error
        if not isinstance(data, dict):
            raise ConfigError(
                f"the plan is a JSON {type(data).__name__}, not an object", fix="save it with Plan.to_json()"
            )
        version = data.pop("version", None)
        if version != VERSION:
            raise ConfigError(f"plan version {version!r} is not {VERSION}", fix="make the plan again with this snnpart")
        unknown = sorted(set(data) - set(cls.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"the plan has unknown fields {unknown}", choices=sorted(cls.__dataclass_fields__))
        return cls(**data)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_table(name: str, table: Any, fits: Callable[[Any], bool], wanted: str) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{name} is a {type(table).__name__}, not an object", fix=f"give {wanted}")
    bad = {path: value for path, value in table.items() if not isinstance(path, str) or not fits(value)}
    if bad:
        raise ConfigError(f"{name} holds {bad}", fix=f"give {wanted}")
