"""What is installed here, what this machine has, and a self-test of seconds.

ntk-marglik doctor [--data-root data] [--runs runs] [--no-test]

A line each: ok, missing (only what needs it will not work), or problem, with which it ends with 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from asdl_marglik import free_memory
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.problem.data.parquet import find_parquet
from ntkmarglik.problem.data.sources import SOURCES, Source

NAME = "ntk-marglik"
OK, MISSING, PROBLEM = "ok", "missing", "problem"
LITTLE_MEMORY = 0.5e9  # bytes; torch with a small network takes about that
Line = tuple[str, str]  # how it is, and what


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = _given(arguments)
    found: list[str] = []

    def look() -> None:
        for status, text in lines(given.data_root, given.runs, test=given.test):
            print(f"{status:8} {text}", flush=True)
            found.append(status)

    return exit_code(look) or int(PROBLEM in found)


def lines(data_root: Path, runs: Path, *, test: bool) -> Iterator[Line]:
    """All that is looked at, each when it is known."""
    yield OK, f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield from packages()
    yield from machine()
    yield from data_sets(data_root)
    yield writable(runs)
    if test:
        yield from self_test()


def packages() -> Iterator[Line]:
    """This package, and what it and its extras need, by the extra that brings it."""
    try:
        asked = importlib.metadata.requires(NAME) or []
        yield OK, f"{NAME} {importlib.metadata.version(NAME)}"
    except importlib.metadata.PackageNotFoundError:
        yield MISSING, f"{NAME} is not installed: these are files of a folder (pip install -e .)"
        asked = []
    yield OK, f"torch {torch.__version__}"
    for name, extra in optional(asked).items():
        try:
            yield OK, f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield MISSING, f"{name}: pip install '{NAME}[{extra}]'"


def optional(asked: list[str]) -> dict[str, str]:
    """Packages that extras bring, and the first extra of each; those of developers are left out.

    asked: as in the metadata, `tyro>=0.9; extra == "runner"`.
    """
    found: dict[str, str] = {}
    for line in asked:
        package, _, condition = line.partition(";")
        extra = condition.partition("==")[2].strip(" \"'")
        name = package.partition("[")[0]
        for sign in "<>=!~ ":
            name = name.partition(sign)[0]
        if extra not in ("", "dev", "docs") and name != NAME:
            found.setdefault(name, extra)
    return found


def machine() -> Iterator[Line]:
    """Threads, cores, GPUs and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield OK, f"{torch.get_num_threads()} threads of torch, {cores} cores that may be used"
    for number in range(torch.cuda.device_count()):
        room = free_memory(torch.device("cuda", number))
        yield OK, f"GPU {number}: {torch.cuda.get_device_name(number)}, {room / 1e9:.1f} GB free"
    room = free_memory(torch.device("cpu"))
    if math.isinf(room):
        yield OK, "memory: the system does not say how much can be had"
    elif room < LITTLE_MEMORY:
        yield PROBLEM, f"{room / 1e9:.2f} GB of memory can be had; close other programs"
    else:
        yield OK, f"{room / 1e9:.1f} GB of memory can be had"


def data_sets(root: Path) -> Iterator[Line]:
    """Which data sets are below a folder; the others are downloaded when they are asked for."""
    has_digits = importlib.util.find_spec("sklearn") is not None
    yield OK if has_digits else MISSING, "data set digits, of scikit-learn"
    for name, source in SOURCES.items():
        folder = root / source.folder
        there = all(_has_split(source, split, folder) for split in source.splits)
        yield OK if there else MISSING, f"data set {name} in {folder}"


def _has_split(source: Source, split: str, folder: Path) -> bool:
    """Whether the files of a split are there, in either layout."""
    idx = [folder / file for file in source.idx_files(split)]
    if idx and all(path.is_file() for path in idx):
        return True
    return bool(find_parquet(folder, source.splits[split]))


def writable(runs: Path) -> Line:
    """Whether run folders can be made: in the folder, or where it would be made."""
    place = runs.absolute()
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return PROBLEM, f"no run can be written below {runs}: {place}: {error.strerror}"
    return OK, f"runs can be written below {runs}"


def self_test() -> Iterator[Line]:
    """An evidence against its definition, and a tiny run; both take seconds."""
    try:
        from ntkmarglik.programs.doctor import selftest
    except ModuleNotFoundError as absent:
        yield PROBLEM, f"no self-test without {absent.name}: pip install '{NAME}[runner]'"
        return
    error = selftest.evidence_error()
    status = OK if error <= selftest.TOLERANCE else PROBLEM
    yield status, f"evidence and gradient against their definition: relative error {error:.0e}"
    start = time.perf_counter()
    try:
        wrong = selftest.tiny_run()
    except (NtkMarglikError, SystemExit) as failure:
        wrong = f"a tiny run failed: {failure}"
    took = time.perf_counter() - start
    yield (PROBLEM, wrong) if wrong else (OK, f"a run of two epochs on digits: {took:.1f} s")


def _given(arguments: list[str] | None) -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="where data files are")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are to be")
    parser.add_argument(
        "--no-test", dest="test", action="store_false", help="leave the self-test out"
    )
    return parser.parse_args(arguments)
