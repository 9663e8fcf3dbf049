"""What training, evaluation and prediction have in common: data, a compiled program, and the ranks it runs on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from snnpart import facts
from snnpart.api import parallelize
from snnpart.errors import ConfigError
from snnpart.facts import TimeRole
from snnpart.layout import TIME
from snnpart.program import CompiledProgram
from snnpart.runtime.running import RunningProgram
from snnpart.vision import build
from snnpart.vision.config import RunConfig
from snnpart.vision.data.checks import check_labels, check_samples
from snnpart.vision.data.loader import Batch, Layout, Loader, Samples
from snnpart.vision.data.sampler import Shares

_READ = {
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum(1),
    "last": lambda x: x[:, -1],
}


@dataclass(frozen=True)
class Session:
    """A launched program and how batches reach it."""

    config: RunConfig
    running: RunningProgram
    logits: Callable[[Any], Tensor]

    @property
    def layout(self) -> Layout:
        return layout_of(self.config)

    @property
    def reports(self) -> bool:
        """Whether this rank speaks for its dp rank: one of each."""
        return self.running.ranks.at.tp == 0 and self.running.ranks.at.pp == 0

    def samples(
        self, data: Any, epoch: int = 0, *, targets: bool = True, chosen: Sequence[int] | None = None
    ) -> Samples:
        """The data as this run reads it."""
        skip = self.config.on_bad_sample == "skip"
        return Samples(data, self.layout, (self.config.seed, epoch), skip, targets, chosen)

    def loader(
        self,
        samples: Samples,
        *,
        order: tuple[int, int] | None = None,
        position: int = 0,
        smallest: int = 0,
        batches: int = 1,
    ) -> Loader:
        """This rank's steps of one pass, of `batches` batches each; see `Shares`."""
        mesh, at = self.running.ranks.mesh, self.running.ranks.at
        size = self.config.batch_size * batches
        lengths = samples.lengths if size * mesh.dp > 1 else None
        shares = Shares(len(samples), size, mesh.dp, at.dp, order, position, smallest, lengths)
        pin = self.running.ranks.device.type == "cuda"
        return Loader(samples, shares, self.layout, self.config.workers, pin)

    def batches(self, loader: Loader, classes: int | None = None) -> Iterator[Batch]:
        """The loader's batches; what a rank cannot read is raised on all of them, a target that is not one of the
        `classes` too."""
        source = iter(loader)
        for _ in range(len(loader)):
            problem, batch = None, None
            try:
                batch = next(source)
                if classes is not None:
                    check_labels(batch.targets, classes, batch.indices)
            except Exception as error:
                problem = error
            self.running.ranks.agree(problem)
            assert batch is not None  # agree raised otherwise
            yield batch


def layout_of(config: RunConfig) -> Layout:
    return Layout(config.input_layout, config.time_steps)


@contextmanager
def opened(
    config: RunConfig, data: Any, name: str, model: nn.Module | None = None, *, targets: bool = True, **options: Any
) -> Iterator[Session]:
    """Compile the model for a batch of the data, start it on all ranks, and end it when the block is left.

    Args:
        data: the part of the data whose first sample shows what a batch looks like; `name` is its name for messages.
        model: instead of what `config.model` says.
        targets: False: none are read.
        options: further keywords of `launch`.
    """
    seed_everything(config)
    skip = config.on_bad_sample == "skip"
    example = check_samples(Samples(data, layout_of(config), (config.seed, 0), skip, targets), name)
    network = build.make_model(config) if model is None else model
    program = parallelize(network, **compile_options(config, example))
    check_scores(program.compiled)
    running: Any = program.launch(**{**launch_settings(config), **options})
    with running:
        yield Session(config, running, reader(running.compiled, config.readout, steps_of(config)))


def compile_options(config: RunConfig, sample: Tensor) -> dict[str, Any]:
    """Keywords of `parallelize`. The gate runs on a batch of two copies of the sample for each microbatch. Whether
    neurons are fused and channels last is for a given plan to say, else for the device."""
    rows = max(2, microbatches_of(config) or config.pp)
    letters, kernels = config.input_layout, on_gpu(config) if config.plan is None else None
    batch = torch.stack([sample] * rows, letters.index("N")).contiguous()
    return {
        "example_inputs": batch,
        "input_layout": letters,
        "time_steps": steps_of(config),
        "tp": config.tp,
        "pp": config.pp,
        "dp": config.dp,
        "fsdp_units": config.fsdp_units,
        "fsdp_reshard": {"auto": "auto", "yes": True, "no": False}[config.fsdp_reshard],
        "microbatches": microbatches_of(config),
        "schedule": config.schedule,
        "plan": config.plan,
        "batchnorm": config.batchnorm,
        "numerics": config.numerics,
        "saved": config.saved,
        "verify": config.verify,
        "memory": config.memory,
        "fuse": kernels,
        "channels_last": "auto" if kernels else kernels,
    }


def device_of(config: RunConfig) -> str:
    """The device a run is for: what was asked for, else a GPU where there is one."""
    return config.device or ("cuda" if torch.cuda.is_available() else "cpu")


def on_gpu(config: RunConfig) -> bool:
    """Whether the run is for a GPU, whose kernels the program then uses: the model itself is made on the CPU."""
    return device_of(config).startswith("cuda")


def steps_of(config: RunConfig) -> int | None:
    """How often a model that computes one step is called; None for one that takes all of T at once."""
    return None if TIME in config.input_layout else config.time_steps


def microbatches_of(config: RunConfig) -> int | None:
    """Parts of a step's batch. Batches whose gradients are accumulated are parts of one: exact, also for uneven ones,
    and gradients are reduced over dp once."""
    accumulate = getattr(config, "accumulate", 1)
    return config.microbatches if accumulate == 1 else (config.microbatches or config.pp) * accumulate


def launch_settings(config: RunConfig) -> dict[str, Any]:
    """Keywords of `launch`."""
    return {
        "device": device_of(config),
        "timeout": timedelta(seconds=config.timeout),
        "precision": config.precision,
        "execution": config.execution,
    }


def seed_everything(config: RunConfig) -> None:
    """Generators of torch, numpy and Python; deterministic algorithms if they were asked for."""
    torch.manual_seed(config.seed)
    np.random.seed(config.seed % 2**32)
    random.seed(config.seed)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def reader(compiled: CompiledProgram, readout: str, steps: int | None) -> Callable[[Any], Tensor]:
    """What turns the network's outputs into logits [N, ...]: its first tensor, batch first, time read out.

    Of a model that is called `steps` times the outputs are stacked at dim 0, also those that are equal at every step.
    """
    batch_dim = compiled.source.outputs[0].batch_dim or 0
    time_dim = _time_dim(compiled) if steps is None else 0

    def logits(outputs: Any) -> Tensor:
        x = next(leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))
        if time_dim is None or readout == "none":
            return x.movedim(batch_dim, 0)
        return _READ[readout](x.movedim((batch_dim, time_dim), (0, 1)))

    return logits


def _time_dim(compiled: CompiledProgram) -> int | None:
    """The dim of the first output that carries T, as the analyses found it."""
    node = compiled.source.graph.output_node().args[0][0]  # type: ignore[index]
    role = facts.get(node, TimeRole)  # type: ignore[arg-type]
    return None if role is None or role.merged else role.dim


def _scores_shape(compiled: CompiledProgram) -> tuple[int, ...]:
    node = compiled.source.graph.output_node().args[0][0]  # type: ignore[index]
    return tuple(int(size) for size in facts.need(node, facts.Value).shape)  # type: ignore[arg-type]


def check_scores(compiled: CompiledProgram) -> None:
    """ConfigError unless the first output has a row for each sample."""
    if compiled.source.outputs[0].batch_dim is None:
        shape = list(_scores_shape(compiled))
        raise ConfigError(
            f"the model's first output has shape {shape}, which does not grow with the batch",
            where=compiled.source.name,
            fix="let forward return the scores [N, classes] first; the loss is taken of them outside of the model",
        )


def class_count(compiled: CompiledProgram) -> int | None:
    """How many classes there are scores for: the size of the first output's last dim; None: one number a sample."""
    shape = _scores_shape(compiled)
    return None if compiled.source.outputs[0].batch_dim == len(shape) - 1 else shape[-1]


def load_weights(model: nn.Module, state: Mapping[str, Tensor], place: str) -> None:
    """The weights into the module; ConfigError where they are another network's."""
    try:
        model.load_state_dict(dict(state))
    except RuntimeError as error:
        raise ConfigError(f"the weights do not fit the model: {error}", where=place) from error
