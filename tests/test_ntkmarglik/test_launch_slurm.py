"""The launcher on SLURM: its commands are stand-ins, everything above them is the real thing."""

import os
import re

import pytest
from launches import fakes, follow, sweep_of, until

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.launch.executors import Slurm

# A stand-in for a cluster: jobs run at once in the background, and can be put back in the queue.
STAND_INS = {
    "sbatch": """
# whole, whoever reads it meanwhile
state() { echo "$2" > "$SIM/$1.new"; mv "$SIM/$1.new" "$SIM/$1.state"; }
id=$(( 100 + $(ls "$SIM" | grep -c script) )); cp "$1" "$SIM/$id.script"
last=$(sed -n 's/.*--array=0-\\([0-9]*\\).*/\\1/p' "$1")
for task in $(seq 0 "${last:-0}"); do
    name=$id; export SLURM_JOB_ID=$id
    if [ -n "$last" ]; then
        name=${id}_$task; export SLURM_ARRAY_JOB_ID=$id SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=$name
    fi
    (
        while :; do
            state "$name" RUNNING; NAME=$name sh "$1"; code=$?
            [ -e "$SIM/$name.requeue" ] || break
            mv "$SIM/$name.requeue" "$SIM/$name.requeued"
        done
        if [ $code = 0 ]; then state "$name" COMPLETED; else state "$name" FAILED; fi
    ) > "$SIM/$name.log" 2>&1 &
done
echo "Submitted batch job $id"
""",
    "srun": """
while :; do
  case "$1" in --unbuffered) shift;; --output) shift 2;; --error) err=$2; shift 2;; *) break;; esac
done
exec "$@" 2>> "$(echo "$err" | sed "s/%A_%a\\|%j/$NAME/; s/%t/0/")"
""",
    "sacct": """
echo asked >> "$SIM/questions"
echo 'JobID|State|NodeList'
for file in "$SIM"/*.state; do echo "$(basename "$file" .state)|$(cat "$file")|node"; done
""",
    "scontrol": 'touch "$SIM/$2.requeue"',
    "scancel": 'echo "CANCELLED by 1" > "$SIM/$1.new"; mv "$SIM/$1.new" "$SIM/$1.state"',
}


@pytest.fixture
def cluster(place, monkeypatch):
    for folder in ("bin", "sim"):
        (place / folder).mkdir()
    for name, text in STAND_INS.items():
        (place / "bin" / name).write_text(f"#!/bin/sh\n{text}")
        (place / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SIM", str(place / "sim"))
    return place / "sim"


def test_parameters_reach_slurm_and_preempted_jobs_continue(place, cluster):
    executor = Slurm(
        2,
        together=True,
        threads=4,
        timeout_min=720,
        gpus_per_node=1,
        slurm_partition="gpu",
        slurm_account="me",
    )
    tasks = fakes(place, "good", "fails_first", "is_preempted_first", "is_put_back_first")
    sweep = sweep_of(tasks, place, executor)
    said = follow(sweep)
    assert [entry.failures for entry in sweep.entries] == [0, 1, 0, 0] and sweep.counts()[
        "done"
    ] == 4
    array, single = sorted(cluster.glob("*.script"))
    flags = set(re.findall(r"^#SBATCH --(\S+)", array.read_text(), re.M))
    assert {
        "array=0-3%2",
        "time=720",
        "gpus-per-node=1",
        "partition=gpu",
        "account=me",
        "cpus-per-task=4",
    } <= flags
    assert "job-name=ntk-marglik" in flags and "export OMP_NUM_THREADS=4" in array.read_text()
    assert "array" not in single.read_text().split("# command")[0].replace("%A_%a", "")
    assert all(
        (cluster / f"100_{n}.requeued").exists() and len(tasks[n].log()) == 2 for n in (2, 3)
    )
    assert any("error: not yet" in line for line in said)


def test_jobs_are_found_again_and_slurm_is_not_asked_all_the_time(place, cluster, monkeypatch):
    tasks = fakes(place, "waits", "waits", "waits")
    sweep_of(tasks, place, Slurm(5, timeout_min=60)).step()
    until(lambda: all(task.log() for task in tasks))
    sweep = sweep_of(tasks, place, Slurm(5, timeout_min=60))
    assert sweep.submitted == 3 and [entry.ticket.id for entry in sweep.entries] == [
        "100",
        "101",
        "102",
    ]
    assert "--array" not in (cluster / "100.script").read_text()
    (cluster / "questions").unlink(missing_ok=True)
    for _ in range(50):
        sweep.step()
    assert sweep.counts()["running"] == 3 and len((cluster / "questions").read_text().split()) <= 4
    sweep.executor.stop(sweep.entries[0].ticket)  # as somebody else would
    (cluster / "101.state").write_text("PREEMPTED\n")
    (tasks[2].folder / "go").touch()
    monkeypatch.setattr("ntkmarglik.programs.launch.executors.REFRESH", 0.0)
    monkeypatch.setattr("ntkmarglik.programs.launch.executors.PREEMPTED", 0.0)
    until(lambda: any("it was pre-empted" in line for line in sweep.step()))
    for task in tasks[:2]:
        (task.folder / "go").touch()
    follow(sweep)
    assert [entry.status for entry in sweep.entries] == ["failed", "done", "done"]
    assert [entry.failures for entry in sweep.entries] == [
        1,
        0,
        0,
    ] and "it was cancelled" in sweep.entries[0].note
    until(tasks[0].finished)


def test_wrong_settings_of_slurm_are_told(cluster):
    with pytest.raises(NtkMarglikError, match="colour"):
        Slurm(1, slurm_colour="red")
