"""Where jobs run: this machine or a SLURM cluster, both through submitit."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil
import submitit
from submitit.helpers import environment_variables

from ntkmarglik.errors import REFUSED, NtkMarglikError
from ntkmarglik.programs.launch.job import Job

FOREVER = 60 * 24 * 365  # minutes; without a limit submitit ends a local job after two
# times SLURM may put a job back that met its time limit: each one continues where the last stopped
REQUEUES = 1000
# seconds between questions to SLURM, whose answers submitit else keeps for ten minutes
REFRESH = 60.0
PREEMPTED = 600.0  # seconds after which a pre-empted job that was not put back is taken for ended
SAME_START = 2.0  # seconds by which clocks may move
Status = Literal["queued", "running", "ended"]
Again = Literal["counted", "free", "never"]  # whether a job that did not succeed is tried again


@dataclass(frozen=True)
class Ticket:
    """A submitted job, so that another launcher finds it again."""

    folder: str  # of submitit: logs and the result
    id: str
    started: float = 0.0  # of a local job's process, whose number may be given to another
    slot: int = 0  # of this machine


class Executor(Protocol):
    """Submits jobs and says how they are."""

    @property
    def name(self) -> str: ...

    @property
    def limit(self) -> int:
        """Of jobs submitted and not ended."""

    @property
    def together(self) -> bool:
        """Whether jobs are submitted as arrays."""

    def submit(self, jobs: Sequence[Job], root: Path, slots: Sequence[int]) -> list[Ticket]: ...

    def attach(self, ticket: Ticket) -> submitit.Job[int]: ...

    def status(self, job: submitit.Job[int]) -> Status: ...

    def failure(self, job: submitit.Job[int]) -> tuple[str, Again]: ...

    def stop(self, ticket: Ticket) -> None: ...


def new_folder(root: Path) -> Path:
    """A folder that no job had before: results of jobs are found by their numbers, which return."""
    for number in itertools.count(len(list(root.glob("*")))):
        with contextlib.suppress(FileExistsError):
            (root / f"{number:05d}").mkdir(parents=True)
            return root / f"{number:05d}"
    raise AssertionError


def environment(threads: int) -> dict[str, str]:
    """Variables of a job: how many cores it may use."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def result_of(job: submitit.Job[int]) -> tuple[str, Again]:
    """Why a job whose result is there did not succeed, if it did not, and whether to try again.

    A program that refuses its command, or whose training diverges, would do so again.
    """
    error = job.exception()
    if error is not None:
        lines = str(error).split("----------------------")[-2].strip().splitlines()
        return lines[-1], "counted"
    code = job.result()
    if code == 0:
        return "", "counted"
    reason = last_line(job.paths.stderr) or f"exit code {code}"
    return reason, "never" if code == REFUSED else "counted"


def last_line(path: Path) -> str:
    """The last thing a job said, without what submitit says."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next(
        (line for line in reversed(lines) if line.strip() and not line.startswith("submitit ")), ""
    )


@dataclass(frozen=True)
class Local:
    """This machine. Jobs outlive their launcher and its terminal."""

    limit: int
    threads: int = 1
    gpus: tuple[int, ...] = ()  # of this machine
    gpus_per_job: int = 0
    name: str = field(default=f"local on {socket.gethostname()}")
    together: bool = False

    def submit(self, jobs: Sequence[Job], root: Path, slots: Sequence[int]) -> list[Ticket]:
        """Start jobs, each on the GPUs of its slot."""
        return [
            self._submit(job, new_folder(root), slot) for job, slot in zip(jobs, slots, strict=True)
        ]

    def _submit(self, job: Job, folder: Path, slot: int) -> Ticket:
        n = self.gpus_per_job
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(
            timeout_min=FOREVER, gpus_per_node=n, visible_gpus=self.gpus[slot * n : (slot + 1) * n]
        )
        with (
            _shielded(folder / "controller.log"),
            environment_variables(**environment(self.threads)),
        ):
            started = executor.submit(job)
        return Ticket(
            str(folder), started.job_id, psutil.Process(int(started.job_id)).create_time(), slot
        )

    def attach(self, ticket: Ticket) -> submitit.Job[int]:
        """A job by its ticket; submitit itself forgets the processes of another launcher."""
        process: Any = _Process(ticket)
        return submitit.LocalJob(ticket.folder, ticket.id, process=process)

    def status(self, job: submitit.Job[int]) -> Status:
        return "ended" if job.done() else "running"

    def failure(self, job: submitit.Job[int]) -> tuple[str, Again]:
        """Why it did not succeed (empty if it did), and whether it is tried again."""
        if not job.paths.result_pickle.exists():
            return "it was killed", "counted"
        return result_of(job)

    def stop(self, ticket: Ticket) -> None:
        """A run ends after its epoch, with a checkpoint; a second call ends it at once."""
        _Process(ticket).send_signal(signal.SIGTERM)


class _Process:
    """A process by its number and start: what submitit asks of the ones it has started."""

    def __init__(self, ticket: Ticket):
        self.ticket = ticket

    def poll(self) -> int | None:
        """None as long as it runs."""
        return None if self._found() else 0

    def send_signal(self, number: int) -> None:
        process = self._found()
        if process is not None:
            process.send_signal(number)

    def _found(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(self.ticket.id))
            same = abs(process.create_time() - self.ticket.started) < SAME_START
            if same and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


@contextlib.contextmanager
def _shielded(log: Path) -> Iterator[None]:
    """What is started here outlives the launcher's terminal, and does not hold its streams open.

    It ignores Ctrl-C and hang-ups (ignored signals stay so in a new program), and what it says goes
    to a file.
    """
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    streams = (1, 2)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    copies = {stream: os.dup(stream) for stream in streams}
    try:
        with log.open("w") as file:
            for stream in streams:
                os.dup2(file.fileno(), stream)
        yield
    finally:
        for stream, copy in copies.items():
            os.dup2(copy, stream)
            os.close(copy)
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Slurm:
    """A SLURM cluster.

    SLURM puts a job back that met its time limit or was pre-empted; it continues its run.
    """

    name = "slurm"

    def __init__(self, limit: int, *, together: bool = False, threads: int = 1, **parameters: Any):
        self.limit = limit
        self.together = together
        setup = [
            f"export {name}={shlex.quote(value)}" for name, value in environment(threads).items()
        ]
        self.parameters = {
            "name": "ntk-marglik",
            "cpus_per_task": threads,
            "slurm_setup": setup,
            "slurm_array_parallelism": limit,
            **parameters,
        }
        self._refreshed = 0.0
        self._preempted: dict[str, float] = {}
        self._executor(Path("unused"))  # wrong parameters are told now

    def _executor(self, folder: Path) -> submitit.AutoExecutor:
        if shutil.which("srun") is None:
            raise NtkMarglikError(
                "--executor slurm, but there is no srun on this machine; start it on a login node "
                "of a cluster, or use --executor local."
            )
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=REQUEUES)
        try:
            executor.update_parameters(**self.parameters)
        except (NameError, ValueError) as error:
            raise NtkMarglikError(f"submitit refuses a setting for SLURM: {error}") from error
        return executor

    def submit(self, jobs: Sequence[Job], root: Path, slots: Sequence[int]) -> list[Ticket]:
        """Submit jobs, as one array or each by itself."""
        folder = new_folder(root)
        executor = self._executor(folder)
        try:
            submitted = (
                executor.submit_array(jobs)
                if self.together
                else [executor.submit(job) for job in jobs]
            )
        except submitit.core.utils.FailedJobError as error:
            raise NtkMarglikError(f"SLURM refuses the jobs: {error}") from error
        return [Ticket(str(folder), job.job_id) for job in submitted]

    def attach(self, ticket: Ticket) -> submitit.Job[int]:
        return submitit.SlurmJob(ticket.folder, ticket.id)

    def status(self, job: submitit.Job[int]) -> Status:
        if time.monotonic() - self._refreshed > REFRESH:
            job.get_info(mode="force")  # about all jobs at once
            self._refreshed = time.monotonic()
        if job.done():
            return "ended"
        if job.state != "PREEMPTED":
            self._preempted.pop(job.job_id, None)
        elif (
            time.monotonic() - self._preempted.setdefault(job.job_id, time.monotonic()) > PREEMPTED
        ):
            return "ended"
        return "running" if job.state in ("RUNNING", "COMPLETING") else "queued"

    def failure(self, job: submitit.Job[int]) -> tuple[str, Again]:
        """Why it did not succeed (empty if it did); who cancels a job does not want it again."""
        reason: str = "it left no result"
        again: Again = "counted"
        if job.paths.result_pickle.exists():
            reason, again = result_of(job)
        if not reason:
            return "", "counted"
        state = job.get_info(mode="force").get("State", "UNKNOWN")
        if state.startswith("CANCELLED"):
            return "it was cancelled", "never"
        if state == "PREEMPTED":
            return "it was pre-empted", "free"
        job.exception()  # waits for a result that a slow file system shows late
        if job.paths.result_pickle.exists():
            return result_of(job)
        return f"{reason} (SLURM: {state})", again

    def stop(self, ticket: Ticket) -> None:
        """Cancel a job."""
        self.attach(ticket).cancel(check=False)
