"""One writer for a run folder."""

import subprocess
import sys
import time

from tiny_runs import ROOT, TINY

from ntkmarglik.programs.classify.command import main
from ntkmarglik.runs.lock import FolderLock

HOLDER = """
import sys, time
from pathlib import Path
from ntkmarglik.runs.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def is_free(path):
    """Whether another process gets the lock."""
    program = "import sys; from ntkmarglik.runs.lock import FolderLock, Path\n"
    program += "FolderLock(Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0 or "another process is writing" in done.stderr
    return done.returncode == 0


def test_a_writer_may_take_its_lock_again_and_holds_it_until_the_first_is_let_go(tmp_path):
    with FolderLock(tmp_path):
        FolderLock(tmp_path).release()
        (tmp_path / "link").symlink_to(tmp_path)
        FolderLock(tmp_path / "link").release()  # another name of the same folder
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


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
