"""Time in units of a plain training step; memory as the peak of a fresh process above its start.

An operation is a function from a case to something to call: what it prepares is not measured, the
call is. `python benchmarks/measure.py module:operation CASE` measures the memory of one operation
alone (used by `peak_mb`).
"""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from laplace_marglik import DataEmphasizedELBO, Evidence, GaussianPrior, MarginalLikelihood
from ntkmarglik.problem.augment import AffineAugmentation
from ntkmarglik.problem.models import build
from ntkmarglik.runs.records import read

SHAPES = {"mininet": (1, 28, 28), "resnet": (3, 32, 32), "wrn": (3, 32, 32)}
# inputs of the unit's training step at most: more are timed as a slice and scaled linearly
SLICE = 250
BATCH = 50  # data points of a streamed batch
# seconds until which a measurement is repeated in any case, and after which in no case
SHORT, LONG = (1.0, 5.0)


@dataclass(frozen=True)
class Case:
    """One estimator on one model, with the numbers of data points, copies and outputs."""

    model: str
    structure: str
    subset: int
    copies: int = 0  # 0: no augmentation, only the prior is learned
    outputs: int | None = 1
    kfac: str = "reduce"
    classes: int = 10
    n_data: int = 0  # 0: a thousand times the subset
    chunk: int | None = None  # inputs per forward pass, None: the library's choice
    plain: bool = False  # weights of convolutions and linear maps only, all else is frozen
    weights: str = "all"  # of a posterior, "all" or "last_layer"

    @property
    def inputs(self) -> int:
        return self.subset * max(1, self.copies)

    def __str__(self) -> str:
        k = "C" if self.outputs is None else self.outputs
        kind = f"-{self.kfac}" if self.structure == "kfac" else ""
        learned = f"affine, A={self.copies}" if self.copies else "prior"
        classes = "" if self.classes == 10 else f", C={self.classes}"
        data = f", N={self.n_data}" if self.n_data else ""
        chunk = f", chunk={self.chunk}" if self.chunk else ""
        plain = ", Conv2d and Linear only" if self.plain else ""
        options = f"{learned}{classes}{data}{chunk}{plain}"
        return f"{self.structure}{kind}-{self.subset}-{k} {self.model} ({options})"


Operation = Callable[[Case], Callable[[], object]]


@dataclass
class Setup:
    """A case's model and data, with weights moved off their (partly zero) initialisation."""

    model: nn.Module
    x: Tensor
    y: Tensor
    ml: MarginalLikelihood


def setup(case: Case) -> Setup:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(case.model, SHAPES[case.model], case.classes)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    if case.plain:
        for module in model.modules():
            for p in module.parameters(recurse=False):
                p.requires_grad_(isinstance(module, nn.Conv2d | nn.Linear))
    x = torch.randn(case.subset, *SHAPES[case.model])
    y = torch.randint(case.classes, (case.subset,))
    augment = AffineAugmentation(case.copies, init=0.1) if case.copies else None
    ml = MarginalLikelihood(
        model,
        "classification",
        n_data=case.n_data or 1000 * case.subset,
        prior=GaussianPrior(model),
        structure=case.structure,
        outputs=case.outputs,
        augment=augment,
        chunk=case.chunk,
        kfac=case.kfac,  # type: ignore[arg-type]
    )
    return Setup(model, x, y, ml)


def estimate(case: Case) -> Callable[[], object]:
    """One estimate of the evidence and its gradient in all hyperparameters."""
    s = setup(case)
    s.ml.describe(s.x)  # planning happens once for a model and is not what is measured
    # the same number in every run
    columns = torch.zeros(1, dtype=torch.long) if case.outputs == 1 else None
    return lambda: differentiated(s.ml(s.x, s.y, columns))


def full_batch(case: Case) -> Callable[[], object]:
    """The evidence of one streamed block of all `subset` data, and its gradient."""
    s = setup(replace(case, n_data=case.subset))
    s.ml.describe(s.x[:2])
    loader = list(zip(s.x.split(BATCH), s.y.split(BATCH), strict=True))
    return lambda: differentiated(s.ml.full_batch(loader))


def differentiated(evidence: Evidence) -> Evidence:
    evidence.total.backward()
    return evidence


def training_step(case: Case) -> Callable[[], object]:
    """Forward and backward on as many inputs as the estimate has, SLICE at most."""
    s, n = setup(case), min(SLICE, case.inputs)
    x, y = s.x.repeat(-(-n // case.subset), 1, 1, 1)[:n], s.y.repeat(-(-n // case.subset))[:n]

    def step(n: int = n) -> None:
        s.model.zero_grad()
        nn.functional.cross_entropy(s.model(x[:n]), y[:n]).backward()

    step(2)  # the libraries' own first-call allocations, which planning makes for an estimate
    return step


def elbo_step(case: Case) -> Callable[[], object]:
    """The data-emphasised ELBO and its gradient, on the inputs of a training step."""
    s = setup(case)
    objective = DataEmphasizedELBO(s.model, "classification", n_data=s.ml.n_data, prior=s.ml.prior)

    def step(n: int = case.subset) -> None:
        s.model.zero_grad()
        objective(s.x[:n], s.y[:n]).backward()

    step(2)  # as for a training step
    return step


def timed(case: Case, operation: Operation = estimate) -> tuple[float, float]:
    """CPU seconds of the operation and of a training step on the same inputs."""
    seconds, step = cpu_seconds(operation(case), training_step(case))
    return seconds, step * case.inputs / min(SLICE, case.inputs)


def cpu_seconds(*functions: Callable[[], object], repeats: int = 3) -> list[float]:
    """The least CPU time of each function, of two rounds: a busy moment favours none of them."""
    least = [math.inf] * len(functions)
    for _ in range(2):
        for index, function in enumerate(functions):
            begin = time.perf_counter()
            # in a row: the second run finds caches and allocator as the first left
            for repeat in itertools.count(1):
                start = time.process_time()
                function()
                least[index] = min(least[index], time.process_time() - start)
                if time.perf_counter() - begin > (SHORT if repeat >= repeats else LONG):
                    break
    return least


def peak_mb(operation: Operation, case: Case) -> float:
    """Peak megabytes of an operation of a benchmark script above its start, in a fresh process."""
    module = Path(
        sys.modules[operation.__module__].__file__ or ""
    ).stem  # also when that is the running script
    command = [sys.executable, __file__, f"{module}:{operation.__name__}", json.dumps(asdict(case))]
    # The same packages as here, whichever copies of them are installed.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return float(done.stdout.strip().splitlines()[-1]) / 1e6


def peak_above_start(function: Callable[[], object]) -> int:
    """Bytes by which resident memory rose above its present level while `function` ran."""
    status = Path("/proc/self/clear_refs")
    before = psutil.Process().memory_info().rss
    status.write_text("5")  # resets the peak counter
    function()
    peak = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(peak.split()[1]) * 1024 - before


def row_store_mb(case: Case) -> float:
    """4 S K P bytes: the rows of a block in float32."""
    parameters = sum(p.numel() for p in setup(case).ml.weights.values())
    return 4 * case.subset * (case.outputs or case.classes) * parameters / 1e6


def chunk_of(case: Case) -> Case:
    """The same case on as many inputs as one chunk of its estimate has."""
    s = setup(case)
    found = re.search(r"inputs per chunk: (\d+)", s.ml.describe(s.x))
    assert found, "MarginalLikelihood.describe no longer names the inputs per chunk"
    return Case(
        case.model, case.structure, min(int(found[1]), case.inputs, SLICE), classes=case.classes
    )


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as the documentation shows it."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def rounded(number: str, digits: int) -> str:
    """A number of a csv file for such a table; nothing where it is not known."""
    return "" if number == "nan" else f"{float(number):.{digits}f}"


def write_csv(target: Path, rows: list[dict[str, object]]) -> None:
    """Rows as a csv file, numbers to four digits."""
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})


def update_csv(target: Path, rows: list[dict[str, object]], *keys: str) -> None:
    """The same, where rows of the file with other values in `keys` stay."""

    def key(row: Mapping[str, object]) -> tuple[object, ...]:
        return tuple(row[name] for name in keys)

    new = {key(row): row for row in rows}
    old = read(target) if target.exists() else []
    write_csv(target, [new.pop(key(row), row) for row in old] + list(new.values()))


if __name__ == "__main__":
    name, function = sys.argv[1].split(":")
    alone: Operation = getattr(importlib.import_module(name), function)
    print(peak_above_start(alone(Case(**json.loads(sys.argv[2])))))
