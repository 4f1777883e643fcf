"""What a second rank costs, measured here, and a model of many: `python benchmarks/distributed.py`.

Measured: the same total work by one process and by two (torchrun, gloo, one thread each), as wall
and CPU time; the ratio of CPU times is the overhead. Modelled: strong and weak scaling to 256 GPUs
from single-rank times measured on one core, the volumes below and the assumptions in `Cluster`. The
second table is a model, not a measurement.

Bytes that a rank sends and receives per step (e bytes per number, R ranks, rings: a sum takes 2
(R-1)/R of its size):

    weights                     e P                         sum
    blocks, one per rank        8 G (prior) + 8 (eta)       sum; e P for a prior per weight
    shared block, kernel        e S K P / R                 rows exchanged; 3 times for 2 passes
                                e G (S K)^2                 sum
    shared data, kfac           e sum_l (D_l^2 + O_l^2)     sum
    shared data, diagonal       e P                         sum
    samples, per product        e k P                       sum
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import measure
import torch
from measure import Case, differentiated, setup
from torch import nn

from laplace_marglik import Ranks, SampledLaplace
from ntkmarglik.learn.distributed import meeting
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import target_file

ROUNDS = 3
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CSV = Path(__file__).parent.parent / "illustrations/data/distributed.csv"
Work = Callable[[], object]


def weight_step(ranks: Ranks | None) -> Work:
    s = setup(Case("mininet", "ntk", 256))
    own = slice(0, 256) if ranks is None else ranks.spans(256)[ranks.rank]
    model = s.model if ranks is None else nn.parallel.DistributedDataParallel(s.model)
    return lambda: nn.functional.cross_entropy(model(s.x[own]), s.y[own]).backward()


def blocks_in_turn(ranks: Ranks | None) -> Work:
    s, column = setup(Case("mininet", "ntk", 64, copies=2)), torch.zeros(1, dtype=torch.long)

    def work() -> None:
        for number in range(2):
            if ranks is None or ranks.owns(number):
                gradients = torch.autograd.grad(
                    s.ml(s.x, s.y, column).total, s.ml.hyperparameters()
                )
        if ranks is not None:
            ranks.sums(gradients, "gradients")

    return work


def shared(case: Case, *, streamed: bool = False) -> Callable[[Ranks | None], Work]:
    """One block, or all data, by all ranks together."""

    def prepared(ranks: Ranks | None) -> Work:
        s, column = setup(case), torch.zeros(1, dtype=torch.long)
        s.ml.ranks = ranks
        batches = list(zip(s.x.split(64), s.y.split(64), strict=True))
        return lambda: differentiated(
            s.ml.full_batch(batches) if streamed else s.ml(s.x, s.y, column)
        )

    return prepared


def samples(ranks: Ranks | None) -> Work:
    s = setup(Case("mininet", "ntk", 128))
    posterior = SampledLaplace(
        s.model, "classification", n_data=128, prior=s.ml.prior, samples=4, ranks=ranks
    )
    system, z = posterior.system([(s.x, s.y)]), torch.randn(4, posterior.layout.size)
    return lambda: system.product(z)


WORK: dict[str, Callable[[Ranks | None], Work]] = {
    "weight step, batch of 256": weight_step,
    "two ntk-64-1 blocks, in turn (affine, A=2)": blocks_in_turn,
    "one ntk-128-1 block, shared (prior)": shared(Case("mininet", "ntk", 128)),
    "one ntk-128-1 block, shared (affine, A=2)": shared(Case("mininet", "ntk", 128, copies=2)),
    "kfac-reduce-256-C, all data (affine, A=2)": shared(
        Case("mininet", "kfac", 256, copies=2, outputs=None, n_data=256), streamed=True
    ),
    "diag-256-1, all data (affine, A=2)": shared(
        Case("mininet", "diag", 256, copies=2, n_data=256), streamed=True
    ),
    "product of 4 samples with the curvature, 128 data": samples,
}


def work_of_ranks(names: list[str], rounds: int) -> None:
    """Measure each piece of work in this process, together with those that torchrun has started."""
    torch.set_num_threads(1)
    with meeting(torch.device("cpu"), 0, 300.0) as ranks:
        for name in names:
            work, least = WORK[name](ranks), [math.inf, math.inf]
            for _ in range(rounds + 1):  # the first prepares plans and memory
                if ranks is not None:
                    ranks.barrier(name)
                wall, cpu = time.perf_counter(), time.process_time()
                work()
                both = [time.perf_counter() - wall, time.process_time() - cpu]
                if ranks is not None:
                    both[0] = ranks.largest(both[0], name)
                    both[1] = ranks.sum(torch.tensor(both[1]), name).item()
                least = [min(a, b) for a, b in zip(least, both, strict=True)]
            if ranks is None or ranks.first:
                print(json.dumps([name, *least]), flush=True)


def measured(ranks: int, names: list[str], rounds: int) -> dict[str, tuple[float, float]]:
    start = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        if ranks > 1
        else []
    )
    command = [sys.executable, *start, __file__, "--rounds", str(rounds), "--work", *names]
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    return {name: (wall, cpu) for name, wall, cpu in lines}


@dataclass(frozen=True)
class Cluster:
    """Assumptions: GPUs against the measured core, links, and the start of a collective."""

    speed: float = 500.0  # times one core
    bandwidth: float = 25e9  # bytes a second and rank
    latency: float = 2e-5  # seconds a collective and doubling of ranks
    algebra: float = 5e12  # operations a second in float64


@dataclass(frozen=True)
class Step:
    """A step at R ranks: core seconds of the busiest, and operations that every rank repeats."""

    shared: Callable[[int], float]
    repeated: Callable[[int], float]  # operations
    volume: Callable[[int], float]  # bytes, each sent and received
    collectives: int

    def seconds(self, ranks: int, cluster: Cluster) -> float:
        if ranks == 1:
            return self.shared(1) / cluster.speed + self.repeated(1) / cluster.algebra
        sent = self.volume(ranks) * (ranks - 1) / ranks / cluster.bandwidth
        waiting = self.collectives * cluster.latency * math.log2(ranks)
        return (
            self.shared(ranks) / cluster.speed
            + self.repeated(ranks) / cluster.algebra
            + sent
            + waiting
        )


def steps(seconds: dict[str, float], *, weak: bool) -> dict[str, Step]:
    """ResNet-18 and CIFAR-10: work that is fixed, or (weak) in proportion to the ranks."""
    s = setup(Case("resnet", "ntk", 2))
    weights = dict(s.model.named_parameters())
    p, g = sum(w.numel() for w in weights.values()), len(weights)
    sides = [
        side for w in weights.values() if w.dim() > 1 for side in (len(w), w.numel() // len(w))
    ]
    squares, cubes = sum(side**2 for side in sides), sum(side**3 for side in sides)

    def each(n: int) -> Callable[[int], int]:
        """What the busiest rank has of n things, or (weak) of n for every rank."""
        return lambda ranks: n if weak else -(-n // ranks)

    batch = each(128 if weak else 1024)
    blocks = each(1 if weak else 64)
    data = each(10_000)
    subset, block = each(128 if weak else 1024), (lambda r: 128 * r) if weak else (lambda r: 1024)
    product = 2 * p * seconds["flop"]  # of a row with another
    return {
        "weight step": Step(lambda r: batch(r) * seconds["step"], lambda r: 0, lambda r: 8 * p, 1),
        "ntk-150-1 blocks, in turn": Step(
            lambda r: 150 * blocks(r) * seconds["ntk"],
            lambda r: 2 * 150**3 * blocks(r),
            lambda r: 16 * g,
            1,
        ),
        "ntk-S-1, one shared block": Step(
            lambda r: subset(r) * (seconds["ntk"] + 2 * block(r) * product),
            lambda r: 2 * block(r) ** 3,
            lambda r: 12 * subset(r) * p + 8 * g * block(r) ** 2,
            4 * g,
        ),
        "kfac-N-C, all data": Step(
            lambda r: data(r) * seconds["kfac"], lambda r: 25 * cubes, lambda r: 8 * squares, 2 * g
        ),
        "product of 8 samples": Step(
            lambda r: data(r) * 8 * 3 * seconds["step"], lambda r: 0, lambda r: 64 * p, 1
        ),
    }


def table(seconds: dict[str, float], cluster: Cluster) -> str:
    """Efficiencies of R ranks in per cent, against one with all work (strong) or its share."""
    lines = [
        "| step | scaling |" + "".join(f" {r} |" for r in RANKS),
        "|" + "---|" * (len(RANKS) + 2),
    ]
    for weak in (False, True):
        for name, step in steps(seconds, weak=weak).items():
            one = step.seconds(1, cluster)
            found = [one / step.seconds(r, cluster) * (1 if weak else 1 / r) for r in RANKS]
            lines.append(
                f"| {name} | {'weak' if weak else 'strong'} |"
                + "".join(f" {100 * e:.0f} |" for e in found)
            )
    return "\n".join(lines)


def single_rank_seconds() -> dict[str, float]:
    """Core seconds per datum of a training step and of estimates, and those of one operation."""
    ntk, step = measure.timed(Case("resnet", "ntk", 16, copies=1))
    kfac, _ = measure.timed(Case("resnet", "kfac", 16, copies=1, outputs=None, n_data=16))
    a = torch.randn(512, 2048)
    (product,) = measure.cpu_seconds(lambda: a @ a.mT)
    return {
        "step": step / 16,
        "ntk": ntk / 16,
        "kfac": kfac / 16,
        "flop": product / (2 * 512 * 512 * 2048),
    }


@dataclass
class Row:
    work: str
    wall_1: float
    wall_2: float
    cpu_1: float
    cpu_2: float

    def __str__(self) -> str:
        gain, overhead = self.wall_1 / self.wall_2, self.cpu_2 / self.cpu_1
        times = f"{1e3 * self.wall_1:.0f} | {1e3 * self.wall_2:.0f}"
        return f"| {self.work} | {times} | {gain:.2f} | {overhead:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", nargs="*", help="measure these in this process, and print them (used by the rest)"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="*", default=list(WORK), help="pieces of work to measure")
    parser.add_argument("--csv", type=target_file, default=CSV)
    parser.add_argument("--no-model", action="store_true", help="measure two ranks only")
    flags = parser.parse_args()
    if flags.work is not None:
        work_of_ranks(flags.work, flags.rounds)
        return
    one, two = (measured(ranks, flags.only, flags.rounds) for ranks in (1, 2))
    rows = [
        Row(name, one[name][0], two[name][0], one[name][1], two[name][1]) for name in flags.only
    ]
    with flags.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    print(
        "| same work by one rank and by two | ms, one | ms, two | gain | CPU time, two / one "
        "|\n|---|---|---|---|---|"
    )
    print("\n".join(map(str, rows)))
    if not flags.no_model:
        seconds = single_rank_seconds()
        print(
            f"\nModel, from {seconds} core seconds per datum, "
            f"{Cluster()}:\n\n{table(seconds, Cluster())}"
        )


if __name__ == "__main__":
    sys.exit(exit_code(main))
