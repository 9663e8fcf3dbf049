"""Train, kill, resume elsewhere, export, evaluate and predict: what a user does, on four processes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from snnpart import vision
from snnpart.runtime.checkpoint import folder, last_whole, read_model
from snnpart.vision.artifact import write
from snnpart.vision.build import make_data
from snnpart.vision.data.sampler import Shares
from tests.distributed.jobs_vision import Clips, clip_net, waves
from tests.distributed.pool import JobFailed, Pool
from tests.vision.nets import Digits, Plain

JOBS = "tests.distributed.jobs_vision"
WAVES = {"model": "tests.vision.nets:Plain", "dataset": f"{JOBS}:waves", "verify": "off"}


def test_digits_from_training_to_prediction(pool: Pool, tmp_path: Path) -> None:
    """tp 2 x pp 2, killed at a random step; goes on with dp 4 to over 95 %; the artifact is the same everywhere."""
    config = {
        "model": "tests.vision.nets:Digits",
        "batch_size": 64,
        "epochs": 6,
        "optimizer_kwargs": {"lr": 5e-3},
        "checkpoint_dir": str(tmp_path / "run"),
        "checkpoint_every": 10,
        "log": str(tmp_path / "log"),
        "seed": 1,
    }
    step = random.Random(5).randrange(30, 60)
    with pytest.raises(JobFailed):
        pool.run(f"{JOBS}:killed_at", ranks=4, config={**config, "tp": 2, "pp": 2}, step=step, rank=3, timeout=180)
    resumed = {**config, "batch_size": 16, "export": str(tmp_path / "artifact")}
    (found, lines), *_ = pool.run(f"{JOBS}:called", ranks=4, command="train", config=resumed, timeout=180)
    assert lines[0]["epoch"] >= 2, "it began anew"
    assert found["top1"] > 0.95 and found["step"] == 6 * 23
    assert set(lines[0]) >= {"step", "train_loss", "validation_loss", "top1", "top5", "images_per_second", "peak_bytes"}
    check_log(tmp_path / "log", epochs=6)

    artifact = {"artifact": str(tmp_path / "artifact")}
    plain = vision.load_artifact(tmp_path / "artifact").load_into(Digits()).eval()
    data = make_data(vision.TrainingConfig(model="x:y")).validation
    x, y = (torch.stack([torch.as_tensor(data[i][k]) for i in range(len(data))]) for k in (0, 1))
    with torch.no_grad():
        logits = plain(x)
    wanted = F.cross_entropy(logits, y).item()
    for topology in ({"ranks": 2, "pp": 2}, {"ranks": 2, "tp": 2}, {"ranks": 4}, {"ranks": 4, "tp": 2, "pp": 2}):
        ranks = topology.pop("ranks")
        for result, _ in pool.run(f"{JOBS}:called", ranks=ranks, command="evaluate", config={**artifact, **topology}):
            assert result["loss"] == pytest.approx(wanted, rel=1e-6)
            assert result["samples"] == len(data)
            assert result["top1"] == pytest.approx((logits.argmax(1) == y).double().mean().item())
    output = tmp_path / "answers.h5"
    pool.run(f"{JOBS}:called", ranks=2, command="predict", config={**artifact, "tp": 2, "output": str(output)})
    with h5py.File(output) as file:
        assert set(file) == {"index", "logits"}
        assert np.array_equal(file["index"], np.arange(len(data)))
        torch.testing.assert_close(torch.from_numpy(file["logits"][:]), logits, rtol=1e-4, atol=1e-5)
        assert {"model", "plan", "snnpart", "torch", "config"} <= set(file.attrs)


def check_log(folder: Path, epochs: int) -> None:
    """A line of JSON, a row of the table for each epoch, and a plot."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(1, epochs + 1))
    assert len((folder / "metrics.csv").read_text().splitlines()) == epochs + 1
    assert (folder / "training.svg").read_text().startswith("<?xml")


def own_loop(steps: int, batch: int) -> list[float]:
    """The user's own loop over the same batches, in one process."""
    torch.manual_seed(0)
    model, data = Plain(), waves().training
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    for epoch in range(10):
        for share in Shares(len(data), batch, order=(0, epoch), smallest=1):  # type: ignore[arg-type]
            pairs = [data[i] for i in share.indices]
            x, y = torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
    return losses[:steps]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"ranks": 4, "tp": 2, "pp": 2, "batch_size": 8}, {"ranks": 4, "batch_size": 2}),
        ({"ranks": 2, "batch_size": 4, "dp": "fsdp2"}, {"ranks": 1, "batch_size": 8}),
        ({"ranks": 2, "batch_size": 2, "accumulate": 2}, {"ranks": 2, "tp": 2, "batch_size": 8}),
    ],
)
def test_a_run_interrupted_within_an_epoch_goes_on_elsewhere(
    pool: Pool, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """7 steps of 8 samples (an epoch of 37 has 5, the last one uneven), then 6 more on other ranks: the losses are
    those of the user's own loop."""
    config = {**WAVES, "epochs": 3, "optimizer_kwargs": {"lr": 0.01}, "checkpoint_dir": str(tmp_path)}
    wanted = own_loop(13, 8)
    before = run(pool, "losses_of", first, config=config, stop=7)
    after = run(pool, "losses_of", second, config=config, stop=13)
    assert before + after == pytest.approx(wanted, rel=1e-9)


def run(pool: Pool, job: str, topology: dict[str, Any], config: dict[str, Any], **arguments: Any) -> Any:
    fields = {name: value for name, value in topology.items() if name != "ranks"}
    results = pool.run(f"{JOBS}:{job}", ranks=topology["ranks"], config={**config, **fields}, **arguments)
    assert all(result == results[0] for result in results), "the ranks disagree"
    return results[0]


def test_frames_of_several_t_are_trained_by_their_t_on_any_ranks(pool: Pool, tmp_path: Path) -> None:
    """An epoch of 16 clips takes 5 steps of at most 4, of one T each; interrupted in its midst."""
    torch.manual_seed(0)
    net, data = clip_net(), Clips()
    optimizer, wanted = torch.optim.AdamW(net.parameters(), lr=0.01), list[float]()
    for epoch in range(2):
        for share in Shares(len(data), 4, order=(0, epoch), smallest=1, lengths=data.lengths):
            x, y = torch.stack([data[i][0] for i in share.indices]), torch.tensor([data[i][1] for i in share.indices])
            optimizer.zero_grad()
            out = net(x)
            assert 0.01 < (out == 1).double().mean() < 0.99, "a spike resets its membrane"
            loss = F.cross_entropy(out.mean(0), y)
            loss.backward()  # type: ignore[no-untyped-call]
            assert all(parameter.grad is not None and parameter.grad.any() for parameter in net.parameters())
            optimizer.step()
            wanted.append(loss.item())
    config: dict[str, Any] = {
        "model": f"{JOBS}:clip_net",
        "dataset": f"{JOBS}:clips",
        "input_layout": "NTCHW",
        "verify": "off",
    }
    config |= {"epochs": 2, "optimizer_kwargs": {"lr": 0.01}, "checkpoint_dir": str(tmp_path)}
    before = run(pool, "losses_of", {"ranks": 2, "batch_size": 2}, config=config, stop=3)
    after = run(pool, "losses_of", {"ranks": 2, "tp": 2, "batch_size": 4}, config=config)
    assert len(before) == 3 and before + after == pytest.approx(wanted, rel=1e-9)


def test_dropout_goes_on_where_it_was(pool: Pool, tmp_path: Path) -> None:
    """On the same ranks a resumed run draws the masks that it would have drawn."""
    config = {**WAVES, "model_kwargs": {"dropout": 0.3}, "epochs": 3, "batch_size": 4, "tp": 2}
    whole = run(pool, "losses_of", {"ranks": 2}, config={**config, "checkpoint_dir": str(tmp_path / "a")}, stop=9)
    kept = {**config, "checkpoint_dir": str(tmp_path / "b")}
    parts = run(pool, "losses_of", {"ranks": 2}, config=kept, stop=4)
    parts += run(pool, "losses_of", {"ranks": 2}, config=kept, stop=9)
    assert parts == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a16_every_sample_counts_once(pool: Pool, tmp_path: Path, ranks: int) -> None:
    """Case A16: 11 samples on 1 to 4 ranks; loss, accuracy and predictions are those of one process."""
    torch.manual_seed(0)
    model, data = Plain().eval(), waves().validation
    write(tmp_path / "artifact", model.state_dict(), {"model": "tests.vision.nets:Plain", **WAVES})
    pairs = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
    x, y = torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])
    with torch.no_grad():
        logits = model(x)
    common = {"artifact": str(tmp_path / "artifact"), "dataset": WAVES["dataset"], "batch_size": 2, "verify": "off"}
    for found, _ in pool.run(f"{JOBS}:called", ranks=ranks, command="evaluate", config=common):
        assert found["loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-9)
        assert found["top1"] == pytest.approx((logits.argmax(1) == y).double().mean().item())
        assert found["samples"] == 11
    output = tmp_path / "out.h5"
    pool.run(
        f"{JOBS}:called", ranks=ranks, command="predict", config={**common, "output": str(output), "targets": True}
    )
    with h5py.File(output) as file:
        assert np.array_equal(file["index"], np.arange(11)) and np.array_equal(file["target"], y)
        np.testing.assert_allclose(file["logits"], logits.float(), rtol=1e-6)


def test_nan_loss_ends_the_run_and_is_never_saved(pool: Pool, tmp_path: Path) -> None:
    """The third step's checkpoint is the last one, it is named, and it is whole."""
    config = {
        **WAVES, "batch_size": 4, "checkpoint_dir": str(tmp_path), "checkpoint_every": 1,
        "loss": "tests.vision.nets:NoNumber", "tp": 2,
    }  # fmt: skip
    for message, _ in pool.run(f"{JOBS}:called", ranks=2, command="train", config=config):
        assert message.startswith("LaunchError: ")
        assert "the loss is nan at step 4 (epoch 1)" in message or "gradients of train step 4" in message
    assert [path.name for path in folder.found(tmp_path)] == ["step-00000003", "step-00000002", "step-00000001"]
    path = last_whole(tmp_path)
    assert path is not None and path.name == "step-00000003"
    assert all(torch.isfinite(tensor).all() for tensor in read_model(path).values())


@pytest.mark.parametrize(
    ("precision", "topology"),
    [
        ("bf16", {"ranks": 4, "tp": 2, "pp": 2}),
        ("fp16", {"ranks": 2, "dp": "fsdp2"}),
        pytest.param("fp16", {"ranks": 2, "pp": 2}, marks=pytest.mark.all),
    ],
)
def test_precision(pool: Pool, tmp_path: Path, precision: str, topology: dict[str, Any]) -> None:
    """Autocast and the loss scale on every topology: the digits are learned, and a resumed run keeps the scale."""
    config = {
        "model": "tests.vision.nets:Digits", "model_kwargs": {"width": 8}, "batch_size": 64, "epochs": 2,
        "optimizer_kwargs": {"lr": 1e-2}, "precision": precision, "verify": "off", "checkpoint_dir": str(tmp_path),
    }  # fmt: skip
    fields = {name: value for name, value in topology.items() if name != "ranks"}
    ranks = topology["ranks"]
    (first, _), *_ = pool.run(f"{JOBS}:called", ranks=ranks, command="train", config={**config, **fields, "epochs": 1})
    (second, _), *_ = pool.run(f"{JOBS}:called", ranks=ranks, command="train", config={**config, **fields})
    assert second["step"] == 2 * first["step"] and second["train_loss"] < first["train_loss"]
    assert second["top1"] > 0.6
    scale = folder.read_head(folder.found(tmp_path)[0])["loss_scale"]
    assert (scale is not None and scale["factor"] > 0) if precision == "fp16" else scale is None


def test_one_rank_cannot_read_and_all_say_so(pool: Pool, tmp_path: Path) -> None:
    """A label out of range is on one dp rank only."""
    config = {**WAVES, "dataset": "tests.distributed.jobs_vision:wrong_label", "batch_size": 4}
    messages = [message for message, _ in pool.run(f"{JOBS}:called", ranks=2, command="train", config=config)]
    assert all("target 9, the network has 3 outputs" in message for message in messages)
