"""Memory that this process can still have: of the machine, and within its own limits."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/")  # where the files of the system are
UNLIMITED = float("inf")


def room_on_machine(system: Path = SYSTEM) -> float:
    """Bytes that can still be had; infinite where the system does not say.

    The smallest of what is free on the machine, what is left of the limits of this process
    (`ulimit -v`, `ulimit -d`), and what is left of those of its control groups (containers, SLURM
    jobs, systemd services).

    Args:
        system: the folder that stands for the root of the file system.
    """
    rooms = [_free_on_machine(system), *_rooms_of_process(system)]
    rooms.extend(group.room() for group in _limited_groups(system))
    return max(0.0, min(rooms))


def _free_on_machine(system: Path) -> float:
    """What no program has taken; all there is where that is not known."""
    for name, amount in _table(system / "proc/meminfo"):
        if name == "MemAvailable:":
            return 1024.0 * amount
    return _physical()


def _physical() -> float:
    """Bytes of the machine."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not known on this system
        return UNLIMITED


def _rooms_of_process(system: Path) -> Iterator[float]:
    """What is left of the limits on addresses and on data of this process."""
    try:
        import resource
    except ImportError:  # no such limits on this system
        return
    for name, kind in (("VmSize:", resource.RLIMIT_AS), ("VmData:", resource.RLIMIT_DATA)):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            used = dict(_table(system / "proc/self/status")).get(name, 0)
            yield limit - 1024.0 * used


@dataclass(frozen=True)
class Group:
    """A control group with a limit.

    Args:
        limit: most bytes.
        usage: file with the bytes that are used.
        cached: line of memory.stat with those of them that can be given back: pages of files.
    """

    limit: int
    usage: Path
    cached: str

    def room(self) -> float:
        """Bytes that are left."""
        used = _number(self.usage) or 0
        given_back = dict(_table(self.usage.with_name("memory.stat"))).get(self.cached, 0)
        return float(self.limit - used + given_back)


@functools.cache  # the files of a dozen groups take longer to read than a small estimate
def _limited_groups(system: Path) -> list[Group]:
    """The control groups of this process, of both versions, that may have less than all memory."""
    try:
        lines = (system / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    mounted = system / "sys/fs/cgroup"
    groups: list[Group] = []
    for line in lines:
        controllers, _, place = line.partition(":")[2].partition(":")
        if not controllers:  # version 2: one tree for everything
            names = ("memory.max", "memory.current", "inactive_file")
            groups.extend(_groups(mounted, place, *names))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            groups.extend(_groups(mounted / "memory", place, *names))
    return groups


def _groups(root: Path, place: str, limit: str, usage: str, cached: str) -> Iterator[Group]:
    """A group and those that it is in, as far as they have limits.

    Args:
        root: of the tree of groups; in a container it is the group itself.
        place: of the group in it.
        limit: name of the file with the most bytes, "max" for any number.
        usage: name of the file with the bytes that are used.
        cached: line of memory.stat with what can be given back.
    """
    parts = Path(place.lstrip("/")).parts
    for depth in range(len(parts) + 1):
        folder = root.joinpath(*parts[:depth])
        most = _number(folder / limit)
        if most is not None and most < _physical():
            yield Group(most, folder / usage, cached)


def _number(path: Path) -> int | None:
    """The number that a file holds; None if there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _table(path: Path) -> Iterator[tuple[str, int]]:
    """The lines `name number` of a file."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[1].isdecimal():
            yield words[0], int(words[1])
