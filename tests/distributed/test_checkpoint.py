"""Checkpoints: saved on one topology and loaded on another, training goes on as if nothing had happened.

Faults: a writer that is killed, a full disk, damaged files. What was reported as saved is there afterwards.
"""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from snnpart.errors import CheckpointError
from snnpart.runtime.checkpoint import folder, last_whole, read_model
from tests.distributed.cases import fill, reset
from tests.distributed.jobs_checkpoint import NETS, OPTIMIZERS, batch_of
from tests.distributed.pool import JobFailed, Pool

JOBS = "tests.distributed.jobs_checkpoint"
A17 = [1.285323116, 1.239055342, 1.100987832, 1.083781883, 1.261172248, 1.154597612]
TP, PP, DP, FSDP, ONE = (
    {"ranks": 4, "tp": 4},
    {"ranks": 2, "pp": 2},
    {"ranks": 2},
    {"ranks": 2, "dp": "fsdp2"},
    {"ranks": 1},
)
UNITS = {**FSDP, "fsdp_units": 3, "fsdp_reshard": True}
MIXED, MIXED_FSDP = {"ranks": 4, "tp": 2, "pp": 2}, {"ranks": 4, "tp": 2, "dp": "fsdp2"}


def one_process(net: str, optimizer: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The user's own loop of six steps; its losses, and the weights after three."""
    model = fill(NETS[net](), scale=0.5 if net == "a17" else 0.9)
    made = OPTIMIZERS[optimizer](model.parameters())
    losses, weights = [], {}
    for step in range(6):
        if step == 3:
            weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        reset(model)
        made.zero_grad()
        x, y = batch_of(net, step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        made.step()
        losses.append(loss.item())
    return losses, weights


def save(pool: Pool, directory: Path, net: str, optimizer: str, **topology: Any) -> tuple[list[float], list[float]]:
    first, second = pool.run(
        f"{JOBS}:save_and_go_on", directory=str(directory), net=net, optimizer=optimizer, **topology
    )[0]
    return first, second


def check_goes_on(
    pool: Pool, directory: Path, net: str, optimizer: str, saved: dict[str, Any], loaded: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Saved on one topology and loaded on the other: losses and weights are those of one process; the weights."""
    wanted, weights = one_process(net, optimizer)
    first, second = save(pool, directory, net, optimizer, **saved)
    assert first + second == pytest.approx(wanted, rel=1e-9)
    results = pool.run(f"{JOBS}:load_and_go_on", directory=str(directory), net=net, optimizer=optimizer, **loaded)
    for _, losses, held in results:
        assert losses == pytest.approx(wanted[3:], rel=1e-9)
        assert sorted(held) == sorted(weights)
        for name, tensor in weights.items():
            torch.testing.assert_close(held[name], tensor, rtol=1e-9, atol=1e-12)
    return weights


def test_a17_numbers(pool: Pool, tmp_path: Path) -> None:
    """Case A17: saved with tp 4 (a rank holds nothing of the 3 outputs), loaded on four other topologies."""
    first, second = save(pool, tmp_path, "a17", "adam", **TP)
    assert first + second == pytest.approx(A17, abs=1e-8)
    for topology in (ONE, {"ranks": 2, "tp": 2}, PP, {"ranks": 4, "tp": 2}):
        for extra, losses, _ in pool.run(f"{JOBS}:load_and_go_on", directory=str(tmp_path), net="a17", **topology):
            assert losses == pytest.approx(A17[3:], abs=1e-8)
            assert extra == {"epoch": 1, "rates": (0.1, {30: 2})}
    weights = read_model(tmp_path / "step-00000003")
    plain = fill(NETS["a17"]())
    plain.load_state_dict(weights, strict=True)


@pytest.mark.parametrize(
    ("saved", "loaded", "optimizer"),
    [
        (MIXED, DP, "adam"),
        (DP, MIXED_FSDP, "adamw"),
        (MIXED_FSDP, PP, "sgd"),
        (FSDP, ONE, "adam"),
        (UNITS, FSDP, "adamw"),
        pytest.param(ONE, MIXED, "sgd", marks=pytest.mark.all),
        pytest.param({"ranks": 3, "tp": 3}, FSDP, "adamw", marks=pytest.mark.all),
        pytest.param(FSDP, {"ranks": 3, "tp": 3}, "adam", marks=pytest.mark.all),
    ],
)
def test_another_topology_goes_on(
    pool: Pool, tmp_path: Path, saved: dict[str, Any], loaded: dict[str, Any], optimizer: str
) -> None:
    """Uneven channels (3 + 4), group borders, a fused projection, flattened columns, FSDP2 over tp."""
    check_goes_on(pool, tmp_path, "odd", optimizer, saved, loaded)
    average = read_model(tmp_path / "step-00000003", "ema")
    start = fill(NETS["odd"](), scale=0.9).state_dict()
    for name, tensor in average.items():
        torch.testing.assert_close(tensor, 2 * start[name], rtol=1e-9, atol=1e-12)


def test_a_full_disk_loses_nothing(pool: Pool, tmp_path: Path) -> None:
    for message, *kept in pool.run(f"{JOBS}:full_disk", ranks=2, directory=str(tmp_path), monkey_rank=1):
        assert "the checkpoint was not saved" in message and "No space left on device" in message
        assert kept == ["step-00000003", "step-00000001"]
    assert not list(tmp_path.glob(".step-*")), "a partial folder was left"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_up(pool: Pool, small_disk: Path) -> None:
    """Checkpoints go to a small disk until it is full: those that were reported are whole, nothing else is there."""
    for message, saved in pool.run(f"{JOBS}:small_disk", ranks=2, directory=str(small_disk)):
        assert "the checkpoint was not saved" in message and "No space left on device" in message
        assert int(saved) >= 1
        assert [path.name for path in folder.found(small_disk)][0] == f"step-{int(saved):08d}"
    assert not list(small_disk.glob(".step-*")), "a partial folder was left"
    for path in folder.found(small_disk):
        assert read_model(path)


def test_chunks_that_do_not_tile_are_not_saved(pool: Pool, tmp_path: Path) -> None:
    for message in pool.run(f"{JOBS}:two_writers_of_one_number", ranks=2, directory=str(tmp_path)):
        assert "'ema.a.weight' of shape (7, 3, 3, 3) has 189 numbers, the ranks hold 63 of it" in message
    assert not folder.found(tmp_path)


@pytest.mark.all
@pytest.mark.parametrize("moment", [3, pytest.param(20, marks=pytest.mark.all)])
def test_a_killed_writer_leaves_the_last_one_whole(pool: Pool, tmp_path: Path, moment: int) -> None:
    """kill -9 of either rank at random moments of writing; what was reported as saved loads."""
    numbers = random.Random(7)
    for attempt in range(moment):
        directory = tmp_path / str(attempt)
        with pytest.raises(JobFailed):
            pool.run(
                f"{JOBS}:killed_while_writing",
                ranks=2,
                directory=str(directory),
                delay=numbers.uniform(0.0, 0.5),
                rank=attempt % 2,
            )
        reported = int((directory / "reported").read_text())
        path = last_whole(directory)
        assert path is not None
        assert int(path.name.removeprefix("step-")) >= reported
        assert read_model(path)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    save(pool, directory, "odd", "adam", ranks=2, tp=2)
    return directory / "step-00000003"


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(bytes(data))


def test_damage_anywhere_is_found(saved: Path, tmp_path: Path) -> None:
    """Every file cut short, and a bit flipped at 50 positions of it."""
    numbers = random.Random(3)
    names = [path.name for path in saved.iterdir()]
    assert {"checkpoint.json", ".metadata"} < set(names) and len(names) >= 4
    for name in names:
        whole = (saved / name).read_bytes()
        positions = [0, len(whole) - 1, *(numbers.randrange(len(whole)) for _ in range(48))]
        damaged = tmp_path / name.strip(".")
        shutil.copytree(saved, damaged)
        for position in positions:
            flip(damaged / name, position)
            check_refused(damaged, name)
            (damaged / name).write_bytes(whole)
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            (damaged / name).write_bytes(whole[:length])
            check_refused(damaged, name)
        (damaged / name).unlink()
        check_refused(damaged, name)


def check_refused(path: Path, name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        folder.check_files(path, folder.read_head(path))
    assert name in str(caught.value)


def test_a_damaged_checkpoint_is_passed_over_and_changes_nothing(pool: Pool, saved: Path, tmp_path: Path) -> None:
    directory = tmp_path / "both"
    directory.mkdir()
    shutil.copytree(saved, directory / "step-00000003")
    shutil.copytree(saved, directory / "step-00000009")
    flip(directory / "step-00000009" / "__1_0.distcp", 100)
    assert last_whole(directory) == directory / "step-00000003"
    messages = pool.run(f"{JOBS}:refused", ranks=2, directory=str(directory), path=str(directory / "step-00000009"))
    assert all("__1_0.distcp is damaged: its checksum differs" in message for message in messages)


def test_another_network_is_refused(pool: Pool, saved: Path) -> None:
    messages = pool.run(f"{JOBS}:refused", ranks=2, directory=str(saved.parent), path=str(saved), net="a17")
    assert all("it holds no 'model.layers.0.weight'" in message for message in messages)
