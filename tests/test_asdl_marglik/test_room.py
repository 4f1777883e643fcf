"""What memory can still be had: of the machine, of the process, of its control groups."""

import resource
import subprocess
import sys

import pytest

from asdl_marglik.passes import room
from asdl_marglik.passes.room import room_on_machine

GB = 2**30


@pytest.fixture(autouse=True)
def _unlimited(monkeypatch):
    """As if this process had no limits, on a machine of 64 GB."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(room, "_physical", lambda: 64.0 * GB)
    room._limited_groups.cache_clear()


@pytest.fixture
def system(tmp_path):
    """A file system with 8 GB free."""
    write(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 8388608 kB\n")
    return tmp_path


def write(system, name, text):
    path = system / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))


def test_without_limits_it_is_what_the_machine_has(system):
    assert room_on_machine(system) == 8 * GB


def test_the_groups_of_version_2_count_with_those_they_are_in(system):
    write(system, "proc/self/cgroup", "0::/job/step\n")
    write(system, "sys/fs/cgroup/job/memory.max", 4 * GB)
    write(system, "sys/fs/cgroup/job/memory.current", 3 * GB)
    write(system, "sys/fs/cgroup/job/memory.stat", f"anon 5\ninactive_file {GB // 2}\n")
    write(system, "sys/fs/cgroup/job/step/memory.max", "max")
    assert room_on_machine(system) == 1.5 * GB
    write(system, "sys/fs/cgroup/job/memory.current", 5 * GB)
    assert room_on_machine(system) == 0  # read again, though the groups are not


def test_the_groups_of_version_1_count(system):
    write(system, "proc/self/cgroup", "12:cpu:/x\n5:memory,hugetlb:/docker/1\nbroken\n")
    folder = "sys/fs/cgroup/memory/docker/1"
    write(system, f"{folder}/memory.limit_in_bytes", 2 * GB)
    write(system, f"{folder}/memory.usage_in_bytes", GB)
    write(system, f"{folder}/memory.stat", "total_inactive_file 0\n")
    # what stands for none there
    write(system, "sys/fs/cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    assert room_on_machine(system) == GB


@pytest.mark.parametrize(
    "kind, line", [(resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")]
)
def test_limits_of_the_process_count(system, kind, line, monkeypatch):
    write(system, "proc/self/status", f"Name: python\n{line}:  {GB // 1024} kB\n")
    limits = {kind: (3 * GB, 3 * GB)}
    unlimited = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda name: limits.get(name, unlimited))
    assert room_on_machine(system) == 2 * GB


def test_a_system_that_says_nothing_has_all_there_is(tmp_path):
    assert room_on_machine(tmp_path) == 64 * GB


PROGRAM = """
import resource
from pathlib import Path
from asdl_marglik.passes.room import room_on_machine
used = int(next(l for l in Path("/proc/self/status").read_text().splitlines()
                if l.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
print(room_on_machine())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_real_limit():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert 0 < float(done.stdout) <= 2**28
