"""Programs that are killed while they write, and their environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SUPPORT = str(Path(__file__).parent)  # what the driver imports is there
# The runner in processes that die half-way through the nth write of a file; everything else is the
# real thing. They are forks of one process that has imported torch, since importing it takes longer
# than these runs.
DRIVER = """
import json, os, signal, sys
from preloaded import preload
from ntkmarglik.runs import checkpoint
from ntkmarglik.runs import folder as track
from ntkmarglik.programs.classify.command import main

preload("classify")

def dying(write, half):
    def wrapped(path, content):
        global left
        left -= str(path).endswith(victim)
        if left == 0:
            half(path, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)
    return wrapped

def half_replaced(path, content):
    path.with_name(path.name + ".partial").write_bytes(content)

def half_appended(path, content):
    with path.open("a") as file:
        file.write(content)

checkpoint.replace = dying(checkpoint.replace, half_replaced)
track._append = dying(track._append, half_appended)
for victim, left in json.loads(sys.argv[1]):
    process = os.fork()
    if process == 0:
        os._exit(main(sys.argv[2:]))
    status = os.waitpid(process, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (victim, left, status)
"""


def kill(deaths, arguments):
    """Run the runner again and again, each time until it dies; deaths: (file, number of write)."""
    command = [sys.executable, "-c", DRIVER, json.dumps(deaths), *arguments]
    environment = {**ENVIRONMENT, "PYTHONPATH": SUPPORT}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
