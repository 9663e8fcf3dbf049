"""The command line: what each command writes, its exit codes and its messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from snnpart.cli import main
from snnpart.plan import Plan

NET = ("tests.nets:Net", "--input", "float64[6,3,8,8]")
FOUR = ("--tp", "2", "--pp", "2")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
        raise SystemExit(0)
    printed = capsys.readouterr()
    return int(caught.value.code or 0), printed.out, printed.err


def test_report_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "report", *NET, *FOUR, "--in-dims", "0")
    assert code == 0, err
    assert "tp=2 pp=2" in out and "Layers split over tp" in out and "conv1" in out


@pytest.mark.parametrize("ending, start", [("html", "<!doctype html>"), ("json", "{"), ("txt", "Net: ")])
def test_report_as_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, ending: str, start: str) -> None:
    path = tmp_path / f"report.{ending}"
    code, out, err = run(capsys, "report", *NET, *FOUR, "--in-dims", "0", "-o", str(path))
    assert code == 0 and out == f"wrote {path}\n", err
    assert path.read_text().startswith(start)


def test_a_plan_can_be_edited_and_given_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert run(capsys, "plan", *NET, *FOUR, "--in-dims", "0", "-o", str(path))[0] == 0
    data = json.loads(path.read_text())
    data["microbatches"] = 3
    path.write_text(json.dumps(data))
    code, out, err = run(capsys, "plan", *NET, "--plan", str(path), "--in-dims", "0")
    assert code == 0, err
    assert Plan.from_json(out).microbatches == 3 and Plan.from_json(out).tp == 2


def test_how_data_parallel_ranks_hold_parameters_is_part_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", *NET, "--in-dims", "0", "--dp", "fsdp2")
    assert code == 0 and Plan.from_json(out).dp == "fsdp2", err
    code, _, err = run(capsys, "plan", *NET, "--in-dims", "0", "--dp", "zero")
    assert code == 1 and "dp='zero' is not known" in err and "fsdp2" in err


def test_verify_says_how_far_the_numbers_are_apart(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "verify", *NET, *FOUR, "--in-dims", "0")
    assert code == 0, err
    assert out.endswith("the program computes what the model computes\n")


def test_trace_prints_a_graph_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    from snnpart.text import parse_graph

    code, out, err = run(capsys, "trace", *NET, "--in-dims", "0")
    assert code == 0, err
    assert parse_graph(out).batch == 6


def test_the_only_layout_that_works_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "trace", *NET)
    assert code == 0 and "layout: batch first (the only one that works)" in err


def test_two_layouts_that_work_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "trace", "tests.nets:Pointwise", "--input", "float32[4,5,6]")
    assert code == 1
    assert "error: the inputs can be read in several layouts" in err and "valid: batch first, TNC" in err


def test_a_model_that_repeats_the_image_itself_keeps_its_step_mode(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("spikingjelly")
    model = "snnpart.vision.recipes:sew_resnet18"
    code, out, _ = run(capsys, "trace", model, "--input", "float32[2,3,32,32]", "--layout", "NCHW")
    assert code == 0 and "float32[4, 2+n, 512, 1, 1]" in out


def test_step_mode_follows_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("spikingjelly")
    model = "spikingjelly.activation_based.model.parametric_lif_net:MNISTNet"
    arguments = (model, "--arg", "channels=4", "--input", "float32[2,3,1,28,28]")
    code, out, err = run(capsys, "trace", *arguments)
    assert code == 0 and "layout: TNCHW (the only one that works)" in err
    assert run(capsys, "trace", *arguments, "--layout", "TNCHW")[1] == out


def test_errors_of_the_program_leave_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "trace", "tests.nets:Branch", "--input", "float32[4,5]", "--in-dims", "0")
    assert code == 1 and err.startswith("error: ") and "nets.py" in err and "to mend it" in err


def test_a_bad_size_leaves_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "report", *NET, "--tp", "0", "--in-dims", "0")
    assert code == 1 and "tp=0 is not a positive number of ranks" in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["report", "tests.nets:Net"], "--input"),
        (["report", "tests.nets", "--input", "float32[2,3,8,8]"], "is not MODULE:NAME"),
        (["report", "tests.nets:Net", "--input", "float32"], "is not an input"),
        (["report", "tests.nets:make", "--input", "float32[2,3,8,8]", "--arg", "colour=red"], "unexpected keyword"),
        (["nonsense"], "nonsense"),
    ],
)
def test_what_is_not_understood_leaves_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and message in " ".join(err.replace("│", " ").split())


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "torch" in out and "gloo" in out


def test_python_m_snnpart() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "snnpart", "run"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "directory" in done.stderr
