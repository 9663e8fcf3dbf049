"""Forward and backward of networks with a loop over time: the program against the user's own eager loop.

    python tools/bench/time_folding.py                    on the CPU, 2 threads
    python tools/bench/time_folding.py --device cuda      the same on one GPU, and kernels launched in a step
    python tools/bench/time_folding.py --quick            tiny networks, once; writes nothing unless --output says where

The two take turns in one run; a time is the median of the repeats after one that warms up. The points named hoisting
are a multi-step network given one image, with hoist-invariant against without. Both sides must come to the same loss,
which is checked before anything is timed. Rows of another machine stay in the table.

On a GPU hoisting is also measured as networks are trained there: fused neurons, channels last, bfloat16, a captured
step. Under bfloat16 sums in another order flip spikes, so there the losses are compared in float32.
"""

from __future__ import annotations

import argparse
import csv
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from time_folding_nets import Net, loops, statics  # noqa: E402

from snnpart import ParallelProgram, parallelize  # noqa: E402
from tools.bench import rows as results  # noqa: E402
from tools.bench.rows import Row  # noqa: E402

KERNELS_RATIO = 2.0
LOSSES_AGREE = 1e-3
CAPTURED_AFTER = 5
"""Steps after which a captured step is replayed."""
Step = Callable[[], float]


@dataclass(frozen=True)
class Measured:
    """Seconds of every repeat of the two sides, and the kernels that a step of each launches by name (GPU only)."""

    net: Net
    peer: tuple[float, ...]
    ours: tuple[float, ...]
    kernels: tuple[Counter[str], Counter[str]] | None = None
    losses: tuple[float, float] = (0.0, 0.0)
    note: str = ""
    hottest: str = ""

    @property
    def ratio(self) -> float:
        return statistics.median(self.peer) / statistics.median(self.ours)


def eager(net: Net, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """The user's step: forward, loss, backward."""

    def step() -> float:
        model.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net.call(model, x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    return step


def compiled(net: Net, model: nn.Module, x: Tensor, **options: Any) -> ParallelProgram:
    return parallelize(model, example_inputs=x, verify="off", **{**net.options, **options})


@contextmanager
def running(net: Net, program: ParallelProgram, x: Tensor, y: Tensor, **launch: Any) -> Iterator[Step]:
    """The same step of the program on this process. With an optimizer the step ends with an update."""
    launched: Any = program.launch(check_inputs=False, **launch)
    with launched:

        def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(net.answer(out), targets)

        def step() -> float:
            if launched.optimizer is None:
                launched.zero_grad()
            return float(launched.train_step(x, y, loss_fn))

        yield step


def passes(program: ParallelProgram) -> str:
    """The passes that changed the graph."""
    changed = [record for record in program.compiled.passes if not record.name.startswith("analyze")]
    return ", ".join(f"{r.name} {r.nodes_before} to {r.nodes_after} nodes" for r in changed)


def measure(net: Net, device: str, repeats: int, hoisting: bool) -> Measured:
    """Time the two sides in turn. With `hoisting` the peer is the program without hoist-invariant."""
    gc.collect()  # networks measured before hold memory in cycles
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = bool(net.launch)
    model = net.make().to(device).train()
    x = torch.rand(net.shape, device=device)
    y = torch.arange(net.shape[net.batch_dim], device=device) % net.classes
    program = compiled(net, model, x)
    with ExitStack() as open_ones:
        sides: tuple[Step, Step]
        if hoisting:
            both = compiled(net, model, x, hoist=False), program
            losses = _losses(net, both, x, y)
            one, two = (open_ones.enter_context(running(net, side, x, y, **net.launch)) for side in both)
            sides = one, two
        else:
            sides = eager(net, model, x, y), open_ones.enter_context(running(net, program, x, y))
            losses = sides[0](), sides[1]()
        times = _in_turn(sides, device, repeats, CAPTURED_AFTER if net.launch else 1)
        kernels = None
        if device == "cuda":
            kernels = _kernels(sides) if hoisting else (launches(sides[0]), _unfused(net, model, x, y))
        measured = Measured(net, *times, kernels, losses, passes(program))
        missed = measured.ratio < net.limits.get(device, 0.0)
        return replace(measured, hottest=hottest(sides[1], device)) if missed else measured


def _losses(net: Net, both: tuple[ParallelProgram, ...], x: Tensor, y: Tensor) -> tuple[float, float]:
    """The losses of two programs' first steps, in the precision of their tensors."""
    found = []
    for program in both:
        with running(net, program, x, y, execution="eager") as step:
            found.append(step())
    return found[0], found[1]


def _in_turn(
    sides: tuple[Step, Step], device: str, repeats: int, warm: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(warm + repeats):
        for step, seconds in zip(sides, times, strict=True):
            taken = timed(step, device)
            if repeat >= warm:
                seconds.append(taken)
    return tuple(times[0]), tuple(times[1])


def _kernels(sides: tuple[Step, Step]) -> tuple[Counter[str], Counter[str]]:
    return launches(sides[0]), launches(sides[1])


def _unfused(net: Net, model: nn.Module, x: Tensor, y: Tensor) -> Counter[str]:
    """The kernels of a step of the program in the user's memory layout without any fused neuron."""
    with running(net, compiled(net, model, x, fuse=False, channels_last=False), x, y) as step:
        step()
        return launches(step)


def timed(step: Step, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def launches(step: Step) -> Counter[str]:
    """Kernels that a step launches, by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return Counter(
        event.name
        for event in found.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem")
    )


def hottest(step: Step, device: str, count: int = 6) -> str:
    """The operations (on a GPU the kernels) that take most of a step's own time, for a point that misses its limit."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as found:
        step()
    spent = {
        event.key: (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total, event.count)
        for event in found.key_averages()
    }
    total = sum(time for time, _ in spent.values()) or 1.0
    most = sorted(spent.items(), key=lambda item: -item[1][0])[:count]
    told = ", ".join(f"{_short(name)} {time / total:.0%} in {calls} calls" for name, (time, calls) in most)
    return f"profile ({total / 1e6:.4g} s): {told}"


def _short(name: str, most: int = 90) -> str:
    """A kernel's name without the template's spelling, which says the same at length."""
    plain = name.removeprefix("void ").replace("at::native::", "").replace("\n", " ")
    return plain if len(plain) <= most else plain[: most - 3] + "..."


def rows(measured: Measured, device: str, quick: bool, hoisting: bool) -> list[Row]:
    """The rows of a point: seconds, and on a GPU kernels."""
    peer_name = "snnpart, hoist=False" if hoisting else "eager loop"
    wanted = None if quick else measured.net.limits.get(device)
    a, b = statistics.median(measured.peer), statistics.median(measured.ours)
    spread = (max(measured.ours) - min(measured.ours)) / b
    agree = abs(measured.losses[0] - measured.losses[1]) <= LOSSES_AGREE * max(abs(measured.losses[0]), 1e-6)
    made = [_row(measured, device, "forward + backward", "s", peer_name, (a, b), f"{spread:.2f}", wanted, agree)]
    if measured.kernels is not None:
        kernels_wanted = KERNELS_RATIO if measured.net.name.startswith("snntorch_conv") and not quick else None
        counts = measured.kernels[0].total(), measured.kernels[1].total()
        made.append(_row(measured, device, "kernels", "1", peer_name, counts, "", kernels_wanted, agree))
    return made


def _row(
    measured: Measured, device: str, metric: str, unit: str, peer_name: str, values: tuple[float, float], spread: str,
    wanted: float | None, agree: bool,
) -> Row:  # fmt: skip
    ratio = values[0] / values[1]
    notes = [measured.note] if metric != "kernels" else []
    notes += [f"at least {wanted:g} wanted"] if wanted is not None else []
    notes += [measured.hottest] if measured.hottest and metric != "kernels" else []
    if metric == "kernels" and measured.kernels and wanted is not None and ratio < wanted:
        most = measured.kernels[1].most_common(8)
        notes.append("most launched: " + ", ".join(f"{_short(name)} {count} times" for name, count in most))
    notes += [] if agree else [f"losses differ: {measured.losses[0]:.6g} and {measured.losses[1]:.6g}"]
    return results.row(
        "time_folding",
        measured.net.name,
        metric,
        unit,
        peer_name=peer_name,
        peer=f"{values[0]:.4g}",
        ours=f"{values[1]:.4g}",
        ratio=f"{ratio:.3f}",
        repeats=len(measured.ours),
        spread=spread,
        machine=machine(device),
        status="ok" if agree and (wanted is None or ratio >= wanted) else "failed",
        note="; ".join(notes),
    )


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} of {results.cores()}"


def write(path: Path, table: Sequence[Row]) -> None:
    """Write the table; rows of other points and machines that the file holds stay."""
    results.write(path, results.replaced(results.read(path), table, lambda one: (one["machine"], one["point"])))


def plot(path: Path) -> Path:
    """Draw the CSV: the ratio of every point, a panel a machine, with the line where both sides are equal."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "snnpart"
    import matplotlib.pyplot as plt

    with path.open(encoding="utf-8") as file:
        table = [entry for entry in csv.DictReader(file) if entry["metric"] == "forward + backward" and entry["ratio"]]
    machines = list(dict.fromkeys(entry["machine"] for entry in table))
    figure, panels = plt.subplots(
        1, len(machines), figsize=(6 * len(machines), 3.6), layout="constrained", squeeze=False
    )
    for panel, name in zip(panels[0], machines, strict=True):
        chosen = [entry for entry in table if entry["machine"] == name]
        colours = ["tab:blue" if entry["status"] == "ok" else "tab:red" for entry in chosen]
        panel.barh([entry["point"] for entry in chosen], [float(entry["ratio"]) for entry in chosen], color=colours)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.invert_yaxis()
        panel.set(xlabel="times faster than the peer", title=name)
    target = path.with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny networks, once")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--point", action="append", help="only points whose name starts so; may be given again")
    parser.add_argument("--output", type=Path, help="CSV; default docs/results/time_folding.csv (not with --quick)")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # otherwise spikes flip and the two losses part
    nets = [(net, False) for net in loops(options.quick)] + [(net, True) for net in statics(options.quick)]
    if options.point:
        nets = [(net, hoisting) for net, hoisting in nets if net.name.startswith(tuple(options.point))]
    if options.device == "cpu":
        nets = [(net, hoisting) for net, hoisting in nets if not net.gpu_only]
    output = options.output or (None if options.quick else ROOT / "docs/results/time_folding.csv")
    table: list[Row] = []
    for net, hoisting in nets:
        measured = measure(net, options.device, 1 if options.quick else options.repeats, hoisting)
        table += rows(measured, options.device, options.quick, hoisting)
        print(f"{net.name}: {measured.ratio:.2f} ({measured.note})", flush=True)
        if output is not None:
            write(output, table)
    if output is not None:
        print(f"wrote {output} and {plot(output)}")
    missed = [f"{entry['point']} ({entry['metric']})" for entry in table if entry["status"] != "ok"]
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
