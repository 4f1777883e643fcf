"""What is installed from a built wheel: complete, importable, and nothing but torch needed by the
libraries.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from ntkmarglik.problem.data import digits

ROOT = Path(__file__).parents[2]
LIBRARIES = ["asdl_marglik", "laplace_marglik"]
UNNEEDED = {".git", ".ci", "build", "data", "runs", "tests", "illustrations"}

# imports every module of the packages from the folder given first, and prints where they were found
IMPORTS = """
import importlib, json, pkgutil, sys
sys.path.insert(0, sys.argv[1])
found = {}
for name in sys.argv[2:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        found[module.name] = importlib.import_module(module.name).__file__
    found[name] = package.__file__
    for public in getattr(package, "__all__", []):
        getattr(package, public)
print(json.dumps(found))
"""


def run(*command, cwd=None):
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def unneeded(folder, names):
    """What a copy of the repository does without."""
    return UNNEEDED & {*names} if Path(folder) == ROOT else ()


def installed(tmp_path, *sources):
    """An empty folder into which wheels of the sources were installed, built from copies: nothing
    is left in ours.
    """
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    for number, source in enumerate(sources):
        copy = tmp_path / f"source{number}"
        shutil.copytree(source, copy, ignore=unneeded)
        options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", wheels]
        run("-m", "pip", "wheel", *options, copy)
    run(
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
        "--target",
        target,
        *sorted(wheels.glob("*.whl")),
    )
    return target


def assert_importable(target, packages):
    found = json.loads(run("-I", "-c", IMPORTS, target, *packages))
    assert all(Path(path).is_relative_to(target) for path in found.values()), found
    return found


def test_one_wheel_holds_everything(tmp_path):
    target = installed(tmp_path, ROOT)
    found = assert_importable(target, [*LIBRARIES, "ntkmarglik"])
    ours = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for folder in (ROOT, ROOT / "dependencies/asdl", ROOT / "dependencies/laplace")
        for name in (*LIBRARIES, "ntkmarglik")
        for path in (folder / name).rglob("*.py")
    }
    assert set(found) == ours
    configs = {p.relative_to(ROOT) for p in (ROOT / "ntkmarglik").rglob("*.yaml")}
    assert configs and all((target / path).exists() for path in configs)
    assert (target / digits.ORDER.relative_to(ROOT)).exists()
    assert all((target / name / "py.typed").exists() for name in LIBRARIES)


def test_the_libraries_can_be_installed_on_their_own(tmp_path):
    target = installed(tmp_path, ROOT / "dependencies/asdl", ROOT / "dependencies/laplace")
    assert_importable(target, LIBRARIES)
    assert not (target / "ntkmarglik").exists()


@pytest.mark.parametrize("folder", [".", "dependencies/asdl", "dependencies/laplace"])
def test_torch_is_all_that_is_needed(folder):
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    names = {need.partition(">")[0] for need in project["dependencies"]}
    assert names <= {"torch", "asdl-marglik"} and project["version"] == "0.2.0"


def test_no_program_changes_the_path():
    programs = [
        *ROOT.glob("*.py"),
        *(p for part in ("scripts", "benchmarks") for p in (ROOT / part).glob("*.py")),
    ]
    assert programs and not [p.name for p in programs if "sys.path.insert" in p.read_text()]
