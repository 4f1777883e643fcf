"""What the numbers of a run depend on besides its settings: data, code, libraries, machine."""

from __future__ import annotations

import functools
import hashlib
import platform
from importlib.util import find_spec
from pathlib import Path

import torch

from ntkmarglik.errors import NtkMarglikError

Origin = dict[str, str]
PACKAGES = ("asdl_marglik", "laplace_marglik", "ntkmarglik")
# with other ones a run would be a run of something else; with another machine it is nearly the same
OF_THE_TASK = ("data", "network")


def origin(identity: Origin, processes: int) -> Origin:
    """Everything of this process on which the last digits of its numbers depend.

    identity: of the task: fingerprints of what it learns from.
    """
    return {
        **identity,
        "code": code(),
        "torch": str(torch.__version__),  # a class of torch's own, which weights_only refuses
        "python": platform.python_version(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "processes": str(processes),
    }


@functools.cache
def code() -> str:
    """A digest of the source of the three packages."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        found = find_spec(package)
        for folder in (found.submodule_search_locations if found else None) or ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def refuse_other_task(before: Origin, now: Origin) -> None:
    """Refuse to continue a run with other data, or from another pretrained network."""
    for name in OF_THE_TASK:
        if name in now and before.get(name, now[name]) != now[name]:
            raise NtkMarglikError(
                f"The {name} of the run to resume are not those that are there now (fingerprint "
                f"{_brief(before[name])}, now {_brief(now[name])}); put the files back, or start "
                "a new run without --resume. Nothing was changed."
            )


def changes(before: Origin, now: Origin) -> list[str]:
    """What else is not as it was when the checkpoint was written, in words."""
    return [
        f"{name} {value} instead of {before.get(name, 'unknown')}"
        for name, value in now.items()
        if name not in OF_THE_TASK and before.get(name) != value
    ]


def _brief(fingerprint: str) -> str:
    return fingerprint if len(fingerprint) <= 30 else f"{fingerprint[:30]}..."
