"""The runner of passes, its instruments, and snnpart-opt, which is both with a text in and a text out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from snnpart import facts, text
from snnpart.errors import ConfigError, PlanError, VerifyError
from snnpart.facts import Domain, Stage, TimeRole, Value
from snnpart.graph import SpikeGraph
from snnpart.instruments import DumpAfter, Log, OpCounts, StopAfter, bisect
from snnpart.pass_manager import PassManager, pipeline_names, written
from snnpart.passes import ANALYZE, REWRITE
from snnpart.passes.rewrite.canonicalize import Canonicalize
from snnpart.trace import trace
from tests.graphs import calls, graph_of

TOOL = Path(__file__).resolve().parent.parent / "tools" / "snnpart-opt"


@dataclass(frozen=True)
class Swap:
    """Turns additions into subtractions: breaks the network, keeps the IR."""

    name: ClassVar[str] = "swap"
    reads: ClassVar[tuple[type, ...]] = ()
    writes: ClassVar[tuple[type, ...]] = ()
    tier: ClassVar[Literal["exact", "reassociates"]] = "reassociates"

    def run(self, graph: SpikeGraph) -> None:
        for node in calls(graph, torch.add):
            node.target = torch.sub


@dataclass(frozen=True)
class Harm(Swap):
    """Leaves a graph that the IR does not allow."""

    name: ClassVar[str] = "harm"

    def run(self, graph: SpikeGraph) -> None:
        facts.drop(next(iter(graph.graph.nodes)), Value)


@dataclass(frozen=True)
class NeedsStage(Swap):
    name: ClassVar[str] = "needs-stage"
    reads: ClassVar[tuple[type, ...]] = (Value, Stage, TimeRole)


def network(x: Tensor) -> Tensor:
    return (x + 1).view(x.shape[0], 6).exp().log() + 2


@pytest.fixture
def graph() -> SpikeGraph:
    return graph_of(network, torch.rand(2, 2, 3))


def test_records_tell_names_times_and_nodes(graph: SpikeGraph) -> None:
    before = len(graph.graph.nodes)
    records = PassManager((*REWRITE, *ANALYZE)).run(graph)
    assert [record.name for record in records] == pipeline_names((*REWRITE, *ANALYZE)).split(",")
    assert records[0].nodes_before == before and all(record.seconds >= 0 for record in records)
    assert {"TimeRole", "Domain", "Cost", "State", "Block"} <= written(graph)


def test_a_fact_that_nothing_writes_is_refused_before_anything_runs(graph: SpikeGraph) -> None:
    with pytest.raises(PlanError) as caught:
        PassManager([Swap(), NeedsStage()]).run(graph)
    assert str(caught.value).startswith("pass 'needs-stage': it reads the facts ['Stage', 'TimeRole'], which no pass")
    assert calls(graph, torch.sub) == []


def test_facts_written_in_an_earlier_run_count(graph: SpikeGraph) -> None:
    PassManager(ANALYZE).run(graph)
    with pytest.raises(PlanError, match=r"\['Stage'\]"):
        PassManager([NeedsStage()]).run(graph)


def test_the_graph_is_verified_after_each_pass(graph: SpikeGraph) -> None:
    with pytest.raises(VerifyError, match="after pass 'harm'"):
        PassManager([*REWRITE, Harm()]).run(graph)
    PassManager([Harm()], verify=False).run(graph)


def test_stop_after(graph: SpikeGraph) -> None:
    records = PassManager((*REWRITE, *ANALYZE), [StopAfter("analyze-state")]).run(graph)
    assert [record.name for record in records] == [*(item.name for item in REWRITE), "analyze-state"]
    assert facts.get(next(iter(graph.graph.nodes)), Domain) is None


def test_dump_after_writes_texts_that_parse(graph: SpikeGraph, tmp_path: Path) -> None:
    dump, only = DumpAfter(tmp_path / "all"), DumpAfter(tmp_path / "one", ["analyze-time"])
    PassManager((Canonicalize(), *ANALYZE), [dump, only]).run(graph)
    assert [path.name for path in dump.written][:2] == ["01-canonicalize.txt", "02-analyze-state.txt"]
    assert [path.name for path in only.written] == ["03-analyze-time.txt"]
    assert text.print_graph(text.parse_graph(dump.written[-1].read_text())) == text.print_graph(graph)


def test_op_counts_and_log(graph: SpikeGraph) -> None:
    counts, lines = OpCounts(), list[str]()
    PassManager([Canonicalize(), Swap()], [counts, Log(lines.append)]).run(graph)
    assert counts.changes["swap"] == {"torch.add": -2, "torch.sub": 2}
    assert counts.changes["canonicalize"][".view"] == -1 and counts.changes["canonicalize"]["torch.reshape"] == 1
    assert len(lines) == 2 and "nodes (+0)" in lines[1]


def test_bisect_finds_the_pass_that_broke_the_check(graph: SpikeGraph) -> None:
    passes = [*REWRITE, *ANALYZE, Swap(), *REWRITE]

    def adds(found: SpikeGraph) -> bool:
        return not calls(found, torch.sub)

    assert bisect(graph, passes, adds) == "swap"
    assert bisect(graph, [*REWRITE, *ANALYZE], adds) is None
    with pytest.raises(ConfigError, match="fails before the first pass"):
        bisect(graph, passes, lambda found: False)
    assert written(graph) == set(), "bisect works on copies"


def run_tool(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)


def test_snnpart_opt_runs_passes_on_text(graph: SpikeGraph, tmp_path: Path) -> None:
    source = tmp_path / "net.txt"
    source.write_text(text.print_graph(graph))
    arguments = [
        "--pass",
        "canonicalize,analyze-domain,analyze-time",
        "--stop-after",
        "analyze-domain",
        "--print-facts",
    ]
    done = run_tool(str(source), *arguments, "--op-counts", "--time", "--dump-after", str(tmp_path / "dump"))
    assert done.returncode == 0, done.stderr
    PassManager([*REWRITE, *[item for item in ANALYZE if item.name == "analyze-domain"]]).run(graph)
    assert done.stdout == text.print_graph(graph, with_origin=False)
    assert "canonicalize .add -2" in done.stderr and "torch.reshape +1" in done.stderr and " ms " in done.stderr
    assert len(list((tmp_path / "dump").iterdir())) == 2


@pytest.mark.all
def test_snnpart_opt_makes_described_layers_again(tmp_path: Path) -> None:
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    module = nn.Sequential(nn.Linear(4, 3), neuron.LIFNode(step_mode="m"))
    graph = trace(module, (torch.rand(5, 2, 4),), in_dims=1, time_dims=0)
    passes = "canonicalize,analyze-state,analyze-time,analyze-domain,analyze-cost"
    done = run_tool("--pass", passes, "--print-facts", stdin=text.print_graph(graph, with_leaves=True))
    assert done.returncode == 0 and done.stderr == ""
    PassManager([*REWRITE, *ANALYZE[:4]]).run(graph)
    assert done.stdout == text.print_graph(graph, with_origin=False, with_leaves=True)
    done = run_tool("--pass", passes, stdin=text.print_graph(graph))
    assert done.returncode == 0 and "1 layers are known by class only: 1" in done.stderr


def test_snnpart_opt_names_what_is_wrong(graph: SpikeGraph) -> None:
    done = run_tool("--pass", "canonicalise", stdin=text.print_graph(graph))
    assert done.returncode == 1 and "there is no pass ['canonicalise']" in done.stderr and "canonicalize" in done.stderr
    done = run_tool(stdin="nonsense")
    assert done.returncode == 1 and "line 1, column 1" in done.stderr
