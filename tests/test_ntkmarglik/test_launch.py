"""The launcher on this machine: finished lines skipped, failures tried again, and nothing lost when
it dies.
"""

import contextlib
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_runs import ROOT, TINY, results

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.classify.command import main

pytest.importorskip("submitit")
from launches import Fake, fakes, follow, sweep_of, until, written

from ntkmarglik.programs.launch.executors import Local


def test_failures_are_tried_again_and_the_limit_is_kept(place):
    tasks = fakes(place, "good", "fails_first", "dies_first", "raises", "good")
    # after lines 2 and 4
    tasks += [Fake(6, "good", tasks[1].folder), Fake(7, "good", tasks[3].folder)]
    tasks[4].folder.mkdir()
    (tasks[4].folder / "summary.json").write_text("{}")
    sweep = sweep_of(tasks, place)
    assert sweep.counts() == {"queued": 6, "running": 0, "done": 1, "failed": 0}
    said = follow(sweep)  # which looks at the limit, too
    assert [entry.status for entry in sweep.entries] == ["done"] * 3 + [
        "failed",
        "done",
        "done",
        "failed",
    ]
    assert [entry.failures for entry in sweep.entries] == [0, 1, 1, 2, 0, 0, 0]
    again = [line for line in said if "1 more try" in line]
    for words in ("line 2.*error: not yet", "line 3.*it was killed", "line 4.*RuntimeError: never"):
        assert any(re.search(words, line) for line in again), words
    assert "line 4, which comes first, failed" in sweep.entries[6].note
    assert not any("line 5" in line for line in said) and tasks[4].log() == []
    times = [line.split() for task in tasks[:3] for line in task.log()]
    events = sorted((float(when), 1 if what == "start" else -1) for what, when in times)
    running = [sum(change for _, change in events[: n + 1]) for n in range(len(events))]
    assert len(events) == 8 and max(running) <= 2
    assert len(list(place.glob("table.launch/jobs/*"))) == 8  # a folder each
    left = {"raises 4": {"failures": 2, "ticket": None}}
    assert json.loads((place / "table.launch/state.json").read_text())["lines"] == left
    renewed = sweep_of(tasks, place)
    assert [entry.failures for entry in renewed.entries] == [0] * 7 and renewed.counts()[
        "queued"
    ] == 2


def test_what_would_fail_again_is_not_tried_again_and_results_are_asked_for(place):
    tasks = fakes(place, "refuses", "ends_without_results")
    sweep = sweep_of(tasks, place)
    follow(sweep)
    assert [entry.status for entry in sweep.entries] == ["failed", "failed"]
    assert tasks[0].log() == ["called"]
    assert "training has diverged" in sweep.entries[0].note
    assert tasks[1].log() == ["called", "called"]
    assert "its results are not there" in sweep.entries[1].note


def launched(tasks, place):
    """A launcher in another process with a terminal's process group, and the reading end of its
    output.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.dup2(writing, 1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            follow(sweep_of(tasks, place))
        finally:
            os._exit(1)
    os.close(writing)
    return child, reading


@pytest.mark.parametrize("end", ["kill -9", "the terminal"])
def test_the_next_launcher_finds_the_jobs_of_one_that_died(end, place):
    tasks = fakes(place, "waits", "good", "waits")
    launcher, output = launched(tasks, place)
    until(lambda: tasks[0].log() and tasks[2].log())
    state = json.loads((place / "table.launch/state.json").read_text())["lines"]
    if end == "kill -9":
        os.kill(launcher, signal.SIGKILL)
    else:
        for number in (signal.SIGINT, signal.SIGHUP):  # Ctrl-C; then it is closed
            os.killpg(launcher, number)
    os.waitpid(launcher, 0)
    ready, _, _ = select.select([output], [], [], 10)
    assert ready and os.read(output, 1) == b""  # jobs do not hold what it writes to
    os.close(output)
    time.sleep(0.2)
    sweep = sweep_of(tasks, place)
    assert sweep.submitted == 2 and sweep.counts()["done"] == 1
    assert sweep.entries[0].ticket.id == state["waits 1"]["ticket"]["id"]
    assert len([line for line in sweep.step() if "running" in line]) == 2
    for task in tasks:
        (task.folder / "go").touch()
    follow(sweep)
    assert sweep.counts()["done"] == 3 and [entry.failures for entry in sweep.entries] == [0, 0, 0]
    assert [len(task.log()) for task in tasks] == [2, 2, 2]  # each was run once


def test_a_job_that_nobody_knows_of_is_waited_for(place):
    """Its controller is killed, and it goes on: the second try must not work beside it."""
    (task,) = tasks = fakes(place, "waits")
    sweep = sweep_of(tasks, place)
    sweep.step()
    until(task.log)
    os.kill(int(sweep.entries[0].ticket.id), signal.SIGKILL)
    until(lambda: sweep.step() and sweep.entries[0].failures == 1)
    sweep.step()
    ticket = sweep.entries[0].ticket
    until(
        lambda: (
            "waiting for another process"
            in "".join(p.read_text() for p in Path(ticket.folder).glob("*.err"))
        )
    )
    assert len(task.log()) == 1
    (task.folder / "go").touch()
    follow(sweep)
    assert [line.split()[0] for line in task.log()] == ["start", "end", "start", "end"]


def test_jobs_are_stopped_on_demand_and_a_number_may_return(place):
    (task,) = tasks = fakes(place, "waits")
    sweep = sweep_of(tasks, place)
    sweep.step()
    until(task.log)
    process = psutil.Process(int(sweep.entries[0].ticket.id))
    assert sweep_of(tasks, place).stop() == 1
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert task.log()[-1] == "interrupted" and sweep_of(tasks, place).submitted == 0
    sweep.entries[0].ticket = type(sweep.entries[0].ticket)(
        str(place), str(os.getpid()), started=1.0
    )
    (said,) = list(sweep._watch())
    assert "it was killed" in said  # this process is another one


def test_a_job_whose_line_was_removed_is_kept_in_mind(place):
    tasks = fakes(place, "waits", "waits")
    sweep_of(tasks, place).step()
    until(lambda: all(task.log() for task in tasks))
    sweep = sweep_of(tasks[1:], place)
    assert list(sweep.removed) == ["waits 1"] and sweep.submitted == 1
    sweep.step()
    sweep._save()
    assert sweep_of(tasks, place).submitted == 2 and sweep_of(tasks[:1], place).stop() == 2
    until(lambda: all(task.log()[-1] == "interrupted" for task in tasks))


def test_jobs_of_another_place_are_not_taken_over(place):
    """Numbers of processes and relative folders mean nothing there."""
    ticket = {"folder": "jobs", "id": "1", "started": 1.0, "slot": 0}
    state = {
        "executor": "slurm",
        "place": "/elsewhere",
        "lines": {"waits 1": {"failures": 0, "ticket": ticket}},
    }
    (place / "table.launch").mkdir()
    for change, words in (
        ({"place": str(place)}, "executor slurm"),
        ({"executor": Local(1).name}, "place /elsewhere"),
    ):
        (place / "table.launch/state.json").write_text(json.dumps({**state, **change}))
        with pytest.raises(NtkMarglikError, match=f"1 jobs of {words}"):
            sweep_of(fakes(place, "waits"), place)


def test_each_job_has_gpus_of_its_own(place, monkeypatch):
    import submitit

    asked = []
    monkeypatch.setattr(
        submitit.LocalExecutor, "update_parameters", lambda _, **given: asked.append(given)
    )
    monkeypatch.setattr(
        submitit.LocalExecutor, "submit", lambda *_: type("Job", (), {"job_id": str(os.getpid())})
    )
    sweep = sweep_of(
        fakes(place, *["good"] * 3), place, Local(2, gpus=(4, 5, 6, 7), gpus_per_job=2)
    )
    sweep.step()
    assert [given["visible_gpus"] for given in asked] == [(4, 5), (6, 7)]
    assert {given["gpus_per_node"] for given in asked} == {2}


@pytest.mark.slow
def test_a_sweep_with_jobs_and_launchers_killed_at_random_ends_as_if_undisturbed(
    place, monkeypatch
):
    """Thirty runs; kill -9 of jobs, of their controllers and of the launcher."""
    seeds, draw = range(30), random.Random(0)
    settings = [*TINY, "--epochs", "2", "--no-baseline", "--threads", "1"]
    lines = [
        f"python classification_image.py {' '.join(settings)} --seed {s} --out runs/{s} --resume"
        for s in seeds
    ]
    path = written(place, "\n".join(lines))
    command = [
        sys.executable,
        str(ROOT / "scripts/launch.py"),
        str(path),
        "--max-parallel",
        "2",
        "--retries",
        "40",
    ]
    plan = ["job", "controller", "launcher"] * 8
    draw.shuffle(plan)

    def start():
        with (place / "said").open("a") as said:
            return subprocess.Popen(
                command, stdout=said, stderr=said, start_new_session=True, cwd=place
            )

    def jobs():
        """Controllers and the processes of their jobs, of this and earlier launchers."""
        found = [
            p
            for p in psutil.process_iter(["cmdline"])
            if str(place) in " ".join(p.info["cmdline"] or [])
        ]
        return (
            [p for p in found if "submitit.local._local" in p.info["cmdline"]],
            [p for p in found if "submitit.core._submit" in p.info["cmdline"]],
        )

    launcher, started = start(), time.time()
    while launcher.poll() is None:
        time.sleep(draw.uniform(1, 10))
        if plan and plan[-1] == "launcher":
            launcher.kill()
            launcher.wait()
            launcher = start()
            plan.pop()
        elif plan and (victims := dict(zip(("controller", "job"), jobs(), strict=True))[plan[-1]]):
            with contextlib.suppress(psutil.NoSuchProcess):
                draw.choice(victims).kill()
                plan.pop()
    said = (place / "said").read_text()
    print(f"{time.time() - started:.0f} s; not killed: {plan}")
    assert launcher.returncode == 0, said
    assert not plan and "30 done, 0 failed" in said
    assert "| digits-64, mlp | ntk-16-5 | 30 |" in said
    monkeypatch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)
    for seed in seeds:
        assert main([*settings, "--seed", str(seed), "--out", f"undisturbed/{seed}"]) == 0
        assert results(place / f"runs/{seed}") == results(place / f"undisturbed/{seed}")
