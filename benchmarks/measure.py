"""Time in units of a plain training step on the same inputs; memory as a fresh process's peak above its start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from laplace_marglik import GaussianPrior, MarginalLikelihood
from torch import Tensor, nn

from ntkmarglik.augment import AffineAugmentation
from ntkmarglik.models import build

SHAPES = {"mininet": (1, 28, 28), "resnet": (3, 32, 32), "wrn": (3, 32, 32)}
SLICE = 250  # inputs of the unit's training step at most: larger ones are run in slices and scaled linearly


@dataclass(frozen=True)
class Case:
    """One estimator on one model: what is estimated, from how many data points, copies and outputs."""

    model: str
    structure: str
    subset: int
    copies: int = 0  # 0: no augmentation, only the prior is learned
    outputs: int | None = 1
    kfac: str = "reduce"

    def __str__(self) -> str:
        k = "C" if self.outputs is None else self.outputs
        kind = f"-{self.kfac}" if self.structure == "kfac" else ""
        learned = f"affine, A={self.copies}" if self.copies else "prior"
        return f"{self.structure}{kind}-{self.subset}-{k} {self.model} ({learned})"


@dataclass
class Setup:
    """A case's model and data, with weights moved off their (partly zero) initialisation."""

    model: nn.Module
    x: Tensor
    y: Tensor
    ml: MarginalLikelihood


def setup(case: Case, **options: object) -> Setup:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(case.model, SHAPES[case.model], 10)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    x, y = torch.randn(case.subset, *SHAPES[case.model]), torch.randint(10, (case.subset,))
    augment = None
    if case.copies:
        augment = AffineAugmentation(case.copies, init=0.1)
    ml = MarginalLikelihood(
        model, "classification", n_data=1000 * case.subset, prior=GaussianPrior(model), structure=case.structure,
        outputs=case.outputs, kfac=case.kfac, augment=augment, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return Setup(model, x, y, ml)


def estimate(s: Setup) -> None:
    """The timed operation: one estimate of the evidence and its gradient in all hyperparameters."""
    s.ml(s.x, s.y).total.backward()


def training_step(s: Setup, copies: int) -> float:
    """CPU seconds of forward and backward on as many inputs as the estimate has."""
    inputs = len(s.x) * max(1, copies)
    size = min(SLICE, inputs)
    x, y = s.x.repeat(-(-size // len(s.x)), 1, 1, 1)[:size], s.y.repeat(-(-size // len(s.y)))[:size]

    def step() -> None:
        s.model.zero_grad()
        nn.functional.cross_entropy(s.model(x), y).backward()

    seconds = cpu_seconds(step) * inputs / size
    s.model.zero_grad()
    return seconds


def cpu_seconds(function: Callable[[], object], repeats: int = 5, at_most: float = 20.0) -> float:
    """The least CPU time of several runs."""
    function()
    times, begin = [], time.perf_counter()
    while len(times) < repeats and (len(times) < 2 or time.perf_counter() - begin < at_most):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def peak_above_start(function: Callable[[], object]) -> int:
    """Bytes by which this process's resident memory rose above its present level while `function` ran."""
    status = Path("/proc/self/clear_refs")
    before = psutil.Process().memory_info().rss
    status.write_text("5")  # resets the peak counter
    function()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024 - before


def in_fresh_process(script: str, *arguments: str) -> str:
    """The last line printed by a benchmark script run in its own process."""
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=root, env={**os.environ, "PYTHONPATH": root}
    )
    return done.stdout.strip().splitlines()[-1]
