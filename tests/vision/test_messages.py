"""What vision says of models, batches and workers that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snnpart import vision
from snnpart.errors import ConfigError, LaunchError
from snnpart.vision.artifact import write
from snnpart.vision.data.loader import Layout, Loader, Samples
from snnpart.vision.data.sampler import Shares
from tests.vision.nets import Plain
from tests.vision.test_training import samples, trained


class Normed(nn.Module):
    """Images [N, 1, 4, 4] to [N, 3] with BatchNorm over [N, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(16).double(), nn.Linear(16, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.flatten(1)))  # type: ignore[no-any-return]


class OneNumber(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean()


class OneNumberEach(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]


@pytest.mark.parametrize("run", ["evaluate", "predict", "train"])
def test_an_output_without_a_row_a_sample_is_refused(run: str, tmp_path: Path) -> None:
    write(tmp_path / "artifact", OneNumber().state_dict(), {"model": "tests.vision.test_messages:OneNumber"})
    given: dict[str, Any] = {"artifact": tmp_path / "artifact", "dataset": samples, "verify": "off"}
    with pytest.raises(ConfigError) as caught:
        if run == "train":
            trained(model=OneNumber)
        elif run == "evaluate":
            vision.evaluate(vision.EvaluationConfig(**given))
        else:
            vision.predict(vision.PredictionConfig(output=tmp_path / "answers.h5", **given))
    assert "the model's first output has shape [], which does not grow with the batch" in str(caught.value)
    assert "let forward return the scores [N, classes] first" in str(caught.value)


def distance(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets[:, 0]).square().mean()


def test_one_number_a_sample_has_no_classes() -> None:
    found = trained(model=OneNumberEach, dataset_kwargs={"kind": "values"}, loss=distance)
    assert 0 < found["validation_loss"] < 9 and found["top1"] == 0.0
    with pytest.raises(ConfigError, match="mixup needs targets that are class numbers"):
        trained(model=OneNumberEach, mixup_alpha=0.5)


@pytest.mark.parametrize("fields", [{"batch_size": 23}, {"batch_size": 24, "microbatches": 24}], ids=str)
def test_batchnorm_over_one_row_says_what_to_change(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a BatchNorm has no more than one value of each channel") as caught:
        trained(model=Normed, **fields)  # 24 samples: the last step of the first has one
    assert "leaves each rank two samples or more" in str(caught.value) and "Traceback" not in str(caught.value)
    assert trained(model=Normed, batch_size=12)["step"] == 2


class Torn:
    """A data set whose second sample cannot be read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        if index == 1:
            raise OSError("truncated file img_1.png")
        return torch.zeros(2), index


class Uneven(Torn):
    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return torch.zeros(2), torch.zeros(index + 1)


class Deadly(Torn):
    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        os._exit(3)


def batches(data: Any, workers: int) -> list[Any]:
    layout = Layout("NF")
    return list(Loader(Samples(data, layout, (0, 0), False), Shares(len(data), 2), layout, workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_is_that_of_the_sample_alone(workers: int) -> None:
    with pytest.raises(ConfigError) as caught:
        batches(Torn(), workers)
    assert str(caught.value) == (
        "sample 1 cannot be read: OSError: truncated file img_1.png\n"
        '  to mend it: mend or remove it, or set on_bad_sample = "skip"'
    )
    with pytest.raises(ConfigError, match=r"^the targets of samples \[0, 1\] cannot be in one batch: stack expects"):
        batches(Uneven(), workers)


def test_a_worker_that_ends_is_told_from_other_errors() -> None:
    with pytest.raises(LaunchError, match=r"^a process that loads data has ended: DataLoader worker") as caught:
        batches(Deadly(), 1)
    assert "workers = 0" in caught.value.fix and "Traceback" not in str(caught.value)


def test_a_checkpoint_is_evaluated_with_the_average_where_it_holds_one(tmp_path: Path) -> None:
    found = trained(model=Plain, checkpoint_dir=tmp_path / "runs", ema=0.5)
    (path,) = (tmp_path / "runs").glob("step-*")
    given: dict[str, Any] = {"model": Plain, "dataset": samples, "verify": "off", "checkpoint": path}
    losses = {w: vision.evaluate(vision.EvaluationConfig(weights=w, **given))["loss"] for w in (None, "average", "raw")}
    assert losses[None] == losses["average"] == pytest.approx(found["validation_loss"], rel=1e-12)
    assert abs(losses["raw"] - losses["average"]) > 1e-6
    plain = trained(model=Plain, checkpoint_dir=tmp_path / "plain")
    (path,) = (tmp_path / "plain").glob("step-*")
    assert vision.evaluate(vision.EvaluationConfig(**{**given, "checkpoint": path}))["loss"] == pytest.approx(
        plain["validation_loss"], rel=1e-12
    )
    with pytest.raises(ConfigError, match="the checkpoint holds no average of the weights"):
        vision.evaluate(vision.EvaluationConfig(**{**given, "checkpoint": path, "weights": "average"}))
    with pytest.raises(ConfigError, match="an artifact holds one set of weights"):
        vision.EvaluationConfig(artifact=tmp_path, weights="raw")


def test_answers_in_double_precision_stay_so(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    torch.manual_seed(0)
    model = Plain()
    write(tmp_path / "artifact", model.state_dict(), {"model": "tests.vision.nets:Plain"})
    config = vision.PredictionConfig(
        artifact=tmp_path / "artifact", dataset=samples, verify="off", output=tmp_path / "answers.h5", split="all"
    )
    with h5py.File(vision.predict(config)) as file:
        logits = torch.from_numpy(file["logits"][:])
    wanted = model(samples().tensors[0]).detach()
    assert logits.dtype == torch.float64
    assert sorted(logits.flatten().tolist()) == pytest.approx(sorted(wanted.flatten().tolist()), rel=1e-12)
