"""Launches with stand-ins for executors and jobs."""

import time
from dataclasses import dataclass
from pathlib import Path

from ntkmarglik.programs.launch.executors import Local
from ntkmarglik.programs.launch.job import Job
from ntkmarglik.programs.launch.sweep import Sweep


@dataclass(frozen=True)
class Fake:
    """A line whose program is one of launch_programs.py."""

    number: int
    program: str
    folder: Path

    @property
    def command(self):
        return f"{self.program} {self.number}"

    def job(self):
        return Job(f"launch_programs:{self.program}", (str(self.folder),), self.folder, Path.cwd())

    def finished(self):
        return (self.folder / "summary.json").exists()

    def progress(self):
        return f"epoch {self.number}/9, loss 0.5"

    def log(self):
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []


def fakes(place, *programs):
    return [Fake(n, program, place / f"run{n}") for n, program in enumerate(programs, start=1)]


def sweep_of(tasks, place, executor=None, retries=1):
    return Sweep(tasks, executor or Local(limit=2), place / "table.launch", retries)


def written(place, text):
    path = place / "table.sh"
    path.write_text(text)
    return path


def until(condition, seconds=300):  # on a busy machine
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "it takes too long"
        time.sleep(0.02)


def follow(sweep):
    said = []

    def over():
        said.extend(sweep.step())
        assert sweep.executor.together or sweep.submitted <= sweep.executor.limit
        return sweep.over

    until(over)
    return said
