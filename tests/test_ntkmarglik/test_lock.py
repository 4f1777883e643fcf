"""One writer for a run folder."""

import subprocess
import sys
import time

import pytest
from tiny_runs import ROOT, TINY

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.classify.run import main
from ntkmarglik.runs.lock import FolderLock

HOLDER = """
import sys, time
from pathlib import Path
from ntkmarglik.runs.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_writer_is_refused_until_the_first_lets_go(tmp_path):
    first = FolderLock(tmp_path)
    with pytest.raises(NtkMarglikError, match="another process is writing"):
        FolderLock(tmp_path)
    first.release()
    FolderLock(tmp_path).release()


def test_a_run_is_refused_while_another_process_writes_and_taken_after_its_death(tmp_path, capsys):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert holder.stdout.readline() == "held\n"
        arguments = [*TINY, "--no-baseline", "--predict", "none", "--out", str(tmp_path)]
        assert main(arguments) != 0
        assert "another process is writing" in capsys.readouterr().err
        assert not (tmp_path / "metrics.jsonl").exists()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    time.sleep(0.1)
    assert main(arguments) == 0
