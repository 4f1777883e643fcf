"""Faults put into real programs: deaths, full disks, limits of memory, a second writer.

    python faults.py  < a task in json  > one line in json for each fault

A program counts the operations on files of its run folder (Python's own audit events), and at the
nth of them something happens. Programs are forks of one process that has imported torch, since
importing it takes longer than these runs.
"""

import errno
import json
import os
import pkgutil
import resource
import signal
import subprocess
import sys
from pathlib import Path

from preloaded import preload

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PROGRAMS = {
    "classify": "ntkmarglik.programs.classify.command:main",
    "grid": "ntkmarglik.programs.grid.command:main",
    "finetune": "ntkmarglik.programs.finetune.command:main",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.rename", "os.link", "os.remove", "os.mkdir")
BACK = 6  # operations after which a disk has room again
FAULTS = {
    "kill": "killed by SIGKILL before an operation on a file",
    "full": "no room on the disk from an operation on",
    "passing": "no room on the disk for a while",
    "read-only": "no file can be written",
    "size": "no file can become larger than some kilobytes",
    "memory": "no more memory than some megabytes",
    "two": "two processes at once in one folder",
}


def inject(program, arguments, faults, place):
    """Run a program with each fault, and once more without; what both runs ended with.

    faults: (kind, number); a number is that of an operation or a size, a share that of all
    operations, and "each" means all of these. place: run folders are made there, named by their
    faults; that of the fault "none" comes first.
    """
    task = {"program": program, "arguments": list(arguments), "faults": faults, "place": str(place)}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def folder_of(place, kind, number):
    return Path(place) / f"{kind}-{number}"


class Hook:
    """An audit hook by which a fault happens; it counts operations on files of a folder."""

    def __init__(self, folder, kind, number):
        self.folder = str(folder)
        self.kind = kind
        self.number = number
        self.count = 0

    def __call__(self, event, arguments):
        path = arguments[0] if arguments else None
        if not isinstance(path, str | os.PathLike):
            return
        if str(path) != self.folder and not str(path).startswith(self.folder + os.sep):
            return
        makes = event in ("os.mkdir", "os.link")
        if event == "open":
            makes = bool(arguments[2] & WRITING)
        if makes or event in CHANGES:
            self.count += 1
            self.happen(makes, str(path))

    def happen(self, makes, path):
        """The fault, if this is its operation. makes: whether it needs room on the disk."""
        if self.kind == "kill" and self.count == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "read-only" and makes:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        full = self.kind == "full" or self.count < self.number + BACK
        if self.kind in ("full", "passing") and makes and self.count >= self.number and full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def _run(main, arguments, folder, kind, number, said):
    """A program in a process of its own; returns the process."""
    process = os.fork()
    if process:
        return process
    with said.open("a") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if kind == "size":
        resource.setrlimit(resource.RLIMIT_FSIZE, (number * 1024, resource.RLIM_INFINITY))
    elif kind == "memory":
        lines = Path("/proc/self/status").read_text().splitlines()
        used = next(int(line.split()[1]) for line in lines if line.startswith("VmSize"))
        limit = 1024 * used + number * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    hook = Hook(folder, kind, number)
    sys.addaudithook(hook)
    code = main([*arguments, "--out", str(folder)])
    if kind == "none":
        folder.with_suffix(".count").write_text(str(hook.count))
    os._exit(code)


def _code(process):
    """The exit code of a process, the negative number of a signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main():
    task = json.load(sys.stdin)
    program = pkgutil.resolve_name(PROGRAMS[task["program"]])
    from ntkmarglik.programs.classify import pictures

    preload(task["program"])
    pictures.draw = lambda *_, **__: None  # slow, and no part of what is stored
    arguments = task["arguments"]
    again = [*arguments, *(["--resume"] if task["program"] != "grid" else [])]
    place = Path(task["place"])
    _report(program, arguments, again, folder_of(place, "none", 0), ("none", 0))
    operations = int(folder_of(place, "none", 0).with_suffix(".count").read_text())
    for kind, number in task["faults"]:
        numbers = range(1, operations + 1) if number == "each" else [number]
        for each in numbers:
            if isinstance(each, float):
                each = max(1, round(each * operations))
            _report(program, arguments, again, folder_of(place, kind, each), (kind, each))


def _report(program, arguments, again, folder, fault):
    """Run a program with a fault and then without, and print what came of it."""
    kind, number = fault
    said = [folder.with_suffix(f".{part}") for part in ("first", "second")]
    if kind == "two":
        pair = [_run(program, arguments, folder, kind, 0, said[0]) for _ in range(2)]
        codes = sorted(map(_code, pair))
    else:
        codes = [_code(_run(program, arguments, folder, kind, number, said[0]))]
    second = _code(_run(program, again, folder, "", 0, said[1]))
    texts = [path.read_text(errors="replace") for path in said]
    result = {"kind": kind, "number": number, "codes": codes, "second": second, "said": texts}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
