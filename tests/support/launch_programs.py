"""What the jobs of test_launch.py do: small programs that fail, die and wait when told to."""

import os
import signal
import subprocess
import time
from pathlib import Path

from ntkmarglik.errors import PASSING, REFUSED
from ntkmarglik.runs.folder import only_writer


def note(folder, text):
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / "log").open("a") as file:
        file.write(f"{text}\n")


def done(folder):
    note(folder, f"start {time.time()}")
    time.sleep(0.2)
    note(folder, f"end {time.time()}")
    (Path(folder) / "summary.json").write_text("{}")
    return 0


def first(folder):
    """Whether this is the first call for a folder."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    there = (Path(folder) / "called").exists()
    (Path(folder) / "called").touch()
    return not there


def good(arguments):
    return done(arguments[0])


def fails_first(arguments):
    if first(arguments[0]):
        os.write(2, b"error: not yet\n")
        return PASSING
    return done(arguments[0])


def dies_first(arguments):
    if first(arguments[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    return done(arguments[0])


def is_preempted_first(arguments):
    """As SLURM does it."""
    if first(arguments[0]):
        os.kill(os.getpid(), signal.SIGUSR2)
    return done(arguments[0])


def is_put_back_first(arguments):
    """As where SLURM sends SIGTERM alone, after which a run stops with a checkpoint."""
    if first(arguments[0]):
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        return 130
    return done(arguments[0])


def refuses(arguments):
    note(arguments[0], "called")
    os.write(2, b"error: training has diverged\n")
    return REFUSED


def ends_without_results(arguments):
    """As a program that says nothing of a full disk."""
    note(arguments[0], "called")
    return 0


def raises(arguments):
    raise RuntimeError("never")


def waits(arguments):
    """Until a file says so, as the only writer of its folder."""
    with only_writer(Path(arguments[0])):
        note(arguments[0], f"start {time.time()}")
        try:
            while not (Path(arguments[0]) / "go").exists():
                time.sleep(0.02)
        except KeyboardInterrupt:
            note(arguments[0], "interrupted")
            return 130
        note(arguments[0], f"end {time.time()}")
        (Path(arguments[0]) / "summary.json").write_text("{}")
    return 0
