"""The topology table where there is no GPU: its cases, sweeps, rows, what an interrupted run keeps, and the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.bench import topology_table
from tools.bench.rows import read
from tools.bench.topology_language import language_cases, language_sweeps
from tools.bench.topology_points import SECTIONS, SWEPT, Case, Settings, scaling, table, vision_sweep
from tools.bench.topology_rows import NO_MEMORY, SLOWER, reasons, rows_of, shortened, value
from tools.bench.topology_scaling import SHARE, with_scaling
from tools.bench.topology_sweep import due, following, result, tried
from tools.bench.vision_rows import MEMORY, NotMeasured, measure

HERE = Settings()
GIB = 2**30


def words(case: Case, side: str) -> str:
    return " ".join(case.sides[side])


def test_the_table_has_the_fourteen_topologies_of_both_networks() -> None:
    cases = list(table(HERE))
    assert len({case.name for case in cases}) == 28 and {case.batch for case in cases} == {32}
    by_name = {case.topology: case for case in cases if case.network == "SEW-ResNet34"}
    assert {t: case.gpus for t, case in by_name.items()} == {
        "1GPU": 1, "DDP2": 2, "FSDP2": 2, "TP2": 2, "PP2": 2, "DDP4": 4, "FSDP4": 4, "TP4": 4, "PP4": 4,
        "TP2+DDP2": 4, "TP2+FSDP2": 4, "PP2+DDP2": 4, "PP2+FSDP2": 4, "TP2+PP2": 4,
    }  # fmt: skip
    assert list(by_name["1GPU"].sides) == ["ours", "cuda_graph", "eager"]
    assert "--batch 16 --size 128 --tp 2 --dp fsdp2" in words(by_name["TP2+FSDP2"], "eager")
    assert "--batch 32 --size 128 --pp 4 --microbatches 4" in words(by_name["PP4"], "ours")


def test_evaluation_is_swept_at_224_with_four_microbatches_on_both_sides_on_real_images() -> None:
    sweeps = {(sweep.network, sweep.topology): sweep for sweep in vision_sweep(True, HERE)}
    assert len(sweeps) == 10
    case = sweeps["Spikformer-S", "PP4"].case(48)
    for side in ("ours", "eager"):
        assert "--size 224 --pp 4 --microbatches 4 --evaluate --images digits" in words(case, side)
    assert sweeps["SEW-ResNet34", "DDP4"].case(32).batch == 128
    random = next(vision_sweep(True, Settings(images=None))).case(32)
    assert "--images" not in words(random, "ours")


def test_scaling_holds_the_batch_of_each_gpu() -> None:
    cases = [case for case in scaling(HERE) if case.network == "Spikformer-S"]
    assert [(case.topology, case.batch) for case in cases] == [
        ("1GPU", 256), ("DDP2", 512), ("FSDP2", 512), ("DDP4", 1024), ("FSDP4", 1024),
    ]  # fmt: skip
    assert all("--batch 256" in words(case, "ours") for case in cases)
    assert list(cases[0].sides) == ["ours", "eager"]


def test_language_rows_say_what_a_side_lacks() -> None:
    cases = {case.topology: case for case in language_cases(HERE)}
    assert len(cases) == 14 and {case.batch for case in cases.values()} == {8}
    assert cases["CP2+DP2"].gpus == 4 and cases["CP2+DP2"].missing["ours"] == "snnpart has no context parallelism"
    assert words(cases["PP2+DP2"], "ours").startswith("spikelm_ours.py --batch 4 --tp 1 --pp 2 --microbatches 4")
    assert "--spikingjelly" in cases["DP2"].missing["llm"]
    given = {case.topology: case for case in language_cases(Settings(checkout="there"))}
    assert "--batch 8 --micro 1 --tp 1 --pp 1 --cp 4 --checkout there" in words(given["CP4"], "llm")
    sweep = {sweep.topology: sweep for sweep in language_sweeps(Settings(checkout="there"))}["DP4"]
    assert sweep.case(2).batch == 8 and "--batch 8 --micro 2" in words(sweep.case(2), "llm")
    (row,) = rows_of(cases["CP4"], {})
    assert row["status"] == "not-run" and list(reasons(row)) == ["llm", "ours"]


def test_a_batch_is_doubled_until_it_fails_then_one_and_a_half_times_the_last_is_tried() -> None:
    def path(fits: Callable[[int], bool], limit: int | None = None) -> list[int]:
        known: dict[int, bool] = {}
        while (batch := following(known, 32, limit)) is not None:
            known[batch] = fits(batch)
        return list(known)

    assert path(lambda batch: batch <= 200) == [32, 64, 128, 256, 192]
    assert path(lambda batch: batch <= 150) == [32, 64, 128, 256, 192]
    assert path(lambda batch: False) == [32]
    assert path(lambda batch: True, limit=100) == [32, 64]
    assert path(lambda batch: batch < 128, limit=100) == [32, 64]


def measured(rate: float, memory: float = 1.0) -> list[dict[str, Any]]:
    return [{"images_per_second": rate * x, MEMORY: memory * GIB} for x in (0.9, 1.0, 1.2)]


def test_rows_compare_ours_with_every_mode_of_the_peer() -> None:
    case = next(table(HERE))
    rows = rows_of(case, {"ours": measured(60.0), "cuda_graph": measured(20.0, 2.0), "eager": measured(80.0)})
    graph, memory, eager, _ = rows
    assert (graph["peer"], graph["ours"], graph["ratio"], graph["status"]) == ("20", "60", "3", "ok")
    assert graph["spread"] == "0.300" and graph["repeats"] == 3
    assert (memory["unit"], memory["ratio"]) == ("GiB", "2")
    assert (eager["status"], eager["note"]) == ("failed", SLOWER)


def test_a_side_that_failed_is_named_and_the_other_kept() -> None:
    case = next(table(HERE))
    found: Any = {"ours": measured(60.0), "cuda_graph": "cuda_graph: no result in 9 s", "eager": measured(6.0)}
    row = rows_of(case, found)[0]
    assert (row["status"], row["ours"], row["peer"]) == ("failed", "60", "")
    assert reasons(row) == {"cuda_graph": "no result in 9 s"}


def test_all_ways_to_run_out_of_memory_are_one() -> None:
    assert shortened("ours: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB; GPU 0") == NO_MEMORY
    assert shortened("ours: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling") == NO_MEMORY
    assert shortened("eager: ValueError: a; b") == "ValueError: a, b"


class Machine:
    """Stands for the processes: what a side's script would print, and the commands it was asked for."""

    def __init__(self, holds: Mapping[str, int], stops_after: int | None = None) -> None:
        self.holds, self.stops_after = holds, stops_after
        self.asked: list[tuple[str, int]] = []

    def measure(self, processes: Any, command: Sequence[str], limit: float) -> dict[str, Any]:
        if len(self.asked) == self.stops_after:
            raise KeyboardInterrupt
        side = "ours" if any("ours" in word for word in command) else "peer"
        batch = int(command[command.index("--batch") + 1])
        self.asked.append((side, batch))
        if batch > self.holds[side]:
            raise NotMeasured("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        rate = {"ours": 100.0, "peer": 10.0}[side] * batch
        return {"images_per_second": rate, "tokens_per_second": rate, MEMORY: batch * GIB}


def run(monkeypatch: pytest.MonkeyPatch, machine: Machine, *options: str) -> None:
    monkeypatch.setattr("tools.bench.vision_rows.measure", machine.measure)
    monkeypatch.setattr("sys.argv", ["topology_table", "--repeats", "1", *options])
    assert topology_table.main() == 0


def test_both_sides_are_swept_each_to_its_end_and_an_interrupted_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "rows.csv"
    options = ("--gpus", "4", "--output", str(target), "--only", "train-sweep", "--points", "Spikformer-S DDP4")
    first = Machine({"ours": 200, "peer": 70}, stops_after=5)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, first, *options)
    second = Machine({"ours": 200, "peer": 70})
    run(monkeypatch, second, *options)
    whole = [("ours", 32), ("peer", 32), ("ours", 64), ("peer", 64), ("ours", 96)]
    assert first.asked[:4] == whole[:4]
    tried_batches = {side: sorted({b for s, b in first.asked + second.asked if s == side}) for side in ("ours", "peer")}
    assert tried_batches == {"ours": [32, 64, 128, 192, 256], "peer": [32, 64, 96, 128]}
    assert ("ours", 32) not in second.asked and ("ours", 64) not in second.asked
    rows = read(target)
    last = next(row for row in rows if row["metric"] == "largest batch" and row["status"] != "not-run")
    assert (last["peer"], last["ours"], last["ratio"], last["status"]) == ("256", "768", "3", "ok")
    failed = next(row for row in rows if row["point"].endswith("DDP4 G=384") and row["unit"] == "images/s")
    assert (failed["ours"], failed["note"], failed["status"]) == ("", f"eager: {NO_MEMORY}", "ok")
    assert (tmp_path / "rows-memory.svg").exists() and (tmp_path / "rows-batch.svg").exists()


def test_rows_that_are_there_are_kept_unless_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    options = (
        "--output",
        str(tmp_path / "rows.csv"),
        "--only",
        "table",
        "--only",
        "spikelm",
        "--points",
        "SEW-ResNet34 ",
    )
    machine = Machine({"ours": 99, "peer": 99})
    run(monkeypatch, machine, "--gpus", "2", *options)
    rows = read(tmp_path / "rows.csv")
    left = [row for row in rows if row["status"] == "not-run"]
    assert len(machine.asked) == 3 + 4 * 2 and len(left) == 9
    assert (
        left[0]["note"] == 'needs 4 GPUs; python tools/bench/topology_table.py --points "table SEW-ResNet34 DDP4 G=32"'
    )
    again = Machine({"ours": 99, "peer": 99})
    run(monkeypatch, again, "--gpus", "1", *options)
    assert not again.asked and read(tmp_path / "rows.csv") == rows
    run(monkeypatch, again, "--gpus", "1", "--again", *options, "--points", "nothing of this name")
    assert [side for side, _ in again.asked] == ["ours", "peer", "peer"]
    assert read(tmp_path / "rows.csv") == rows and (tmp_path / "rows.svg").exists()


def test_the_share_of_linear_scaling_is_taken_from_the_rows() -> None:
    one, two, _, four, _ = (case for case in scaling(HERE) if case.network == "SEW-ResNet34")
    found = {one: (1000.0, 100.0), two: (1900.0, 150.0), four: (3600.0, 100.0)}
    rows = [
        row
        for case, (ours, peer) in found.items()
        for row in rows_of(case, {"ours": measured(ours), "eager": measured(peer)})
    ]
    shares = {row["point"]: row for row in with_scaling(with_scaling(rows)) if row["metric"] == SHARE}
    assert list(shares) == ["scaling SEW-ResNet34 DDP2 G=512", "scaling SEW-ResNet34 DDP4 G=1024"]
    assert [(row["ours"], row["peer"], row["status"]) for row in shares.values()] == [
        ("0.950", "0.750", "ok"),
        ("0.900", "0.250", "failed"),
    ]


def test_a_mode_that_has_ended_leaves_the_others_to_go_on() -> None:
    sweep = next(vision_sweep(False, HERE))
    case = sweep.case(32)
    rows = rows_of(case, {"ours": measured(9.0), "cuda_graph": f"cuda_graph: {NO_MEMORY}", "eager": measured(1.0)})
    assert tried(sweep, rows, "cuda_graph") == {32: False} and tried(sweep, rows, "eager") == {32: True}
    following_case, sides = due(sweep, rows, None) or pytest.fail("nothing is due")
    assert (following_case.batch, sides) == (64, ["ours", "eager"])
    rows += rows_of(following_case, {"ours": f"ours: {NO_MEMORY}", "eager": measured(2.0)})
    assert {row["peer_name"] for row in rows if row["point"].endswith("=64")} == {
        "SpikingJelly cuda_graph",
        "SpikingJelly eager",
    }
    assert [
        value(row, "eager") for row in rows if row["point"].endswith("=64") and row["metric"] != "peak memory reserved"
    ] == [None, 2.0]
    ended = {row["peer_name"]: row for row in result(sweep, rows)}
    assert ended["SpikingJelly eager"]["status"] == "failed" and ended["SpikingJelly eager"]["ours"] == "32"
    assert ended["SpikingJelly cuda_graph"]["note"] == "cuda_graph: no batch ran"


def test_the_plan_says_what_would_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["topology_table", "--plan", "--gpus", "2", "--output", "nowhere.csv"])
    assert topology_table.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 28 + 10 + 10 + 10 + 14 + 5 + 1
    assert any(line.startswith("table SEW-ResNet34 DDP4 G=32") and "needs 4 GPUs" in line for line in lines)
    assert lines[-1].startswith("25 of 77 would run on 2 GPUs, about ")


def test_sections_are_those_of_the_options() -> None:
    assert tuple(topology_table.items(HERE)) == SECTIONS and len(SWEPT) == 5
    with pytest.raises(SystemExit):
        topology_table.arguments(["--only", "nothing"])
    quick = topology_table.arguments(["--quick", "--device", "cpu"])
    assert (quick.repeats, quick.random, quick.gpus) == (1, True, 1)


@pytest.mark.all
def test_a_quick_run_on_two_processes_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every script of ours, over gloo; the peer's trainer needs CUDA, which its rows say."""
    target = tmp_path / "rows.csv"
    chosen = ("table SEW-ResNet34 TP2", "eval-sweep SEW-ResNet34 1GPU", "spikelm SpikeLM-1.41B PP2")
    options = [word for text in chosen for word in ("--points", text)]
    monkeypatch.setattr("sys.argv", ["topology_table", "--quick", "--device", "cpu", "--gpus", "2", "--first", "8",
                                     "--largest", "8", "--output", str(target), *options])  # fmt: skip
    assert topology_table.main() == 0
    rows = {row["point"]: row for row in read(target) if row["unit"] != "GiB"}
    assert [name for name, row in rows.items() if row["ours"]] == [
        "table SEW-ResNet34 TP2 G=32",
        "eval-sweep SEW-ResNet34 1GPU G=8",
        "eval-sweep SEW-ResNet34 1GPU largest",
        "spikelm SpikeLM-1.41B PP2 G=8",
    ]
    assert rows["table SEW-ResNet34 TP2 G=32"]["note"] == "eager: its trainer needs CUDA"


class Ended:
    """Turns whose process ended without a result."""

    def __init__(self, err: str) -> None:
        self.err = err

    def run(self, command: Sequence[str], limit: float) -> tuple[str, str]:
        return "", self.err


def test_that_one_rank_ran_out_of_memory_is_why_all_failed() -> None:
    err = "[rank0]: DistBackendError: NCCL was aborted\n[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n"
    with pytest.raises(NotMeasured, match="^.rank1.: torch.OutOfMemoryError"):
        measure(Ended(err), ["x"], 1.0)  # type: ignore[arg-type]
    with pytest.raises(NotMeasured, match="^.rank0.: DistBackendError"):
        measure(Ended(err.splitlines()[0]), ["x"], 1.0)  # type: ignore[arg-type]
