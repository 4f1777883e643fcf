"""Who may import whom, that the code is clean and typed, and that its READMEs run."""

import ast
import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "asdl_marglik": ROOT / "dependencies/asdl/asdl_marglik",
    "laplace_marglik": ROOT / "dependencies/laplace/laplace_marglik",
    "ntkmarglik": ROOT / "ntkmarglik",
}
# beyond the standard library; the application may use any library, but nothing above itself
ALLOWED = {
    "asdl_marglik": {"torch", "asdl_marglik"},
    "laplace_marglik": {"torch", "asdl_marglik", "laplace_marglik"},
}
# a module for the training loop of another library needs that library
INTEGRATED = {"transformers", "lightning"}
ABOVE_THE_APPLICATION = {
    *(path.stem for path in ROOT.glob("*.py")),
    *("benchmarks", "figures", "scripts", "tests"),
}
FILES = [(name, path) for name, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]


def imported(path, package):
    """Top-level names of everything a file imports, relative imports resolved against its
    package.
    """
    inside = path.relative_to(PACKAGES[package].parent).parts[:-1]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = len(inside) - node.level + 1
            names.add(
                node.module.partition(".")[0]
                if not node.level
                else inside[0]
                if above >= 1
                else "outside"
            )
    return names


def test_there_is_something_to_check():
    assert {name for name, _ in FILES} == set(PACKAGES)
    assert imported(PACKAGES["laplace_marglik"] / "prior.py", "laplace_marglik") >= {
        "torch",
        "asdl_marglik",
        "math",
    }


@pytest.mark.parametrize(
    "package, path", FILES, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_imports_go_down(package, path):
    beyond = imported(path, package) - set(sys.stdlib_module_names)
    if path.parent.name == "integrations":
        beyond -= INTEGRATED & {path.stem}
    if package in ALLOWED:
        assert beyond <= ALLOWED[package]
    else:
        assert not beyond & ABOVE_THE_APPLICATION and "outside" not in beyond


@pytest.mark.parametrize(
    "package, path", FILES, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_files_are_named_by_what_they_are(package, path):
    assert path.stem not in ("utils", "util", "helpers", "helper", "common", "misc")


@pytest.mark.parametrize("package", ["asdl_marglik", "laplace_marglik"])
def test_packages_are_typed(package):
    assert (PACKAGES[package] / "py.typed").exists()


@pytest.mark.parametrize("package", ["asdl_marglik", "laplace_marglik"])
def test_public_names_exist(package):
    module = __import__(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    "command", [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]], ids=" ".join
)
def test_clean(command):
    pytest.importorskip(command[0])
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "readme", sorted(ROOT.glob("dependencies/*/README.md")), ids=lambda path: path.parent.name
)
def test_readme_examples_run(readme):
    if ">>>" not in readme.read_text():
        pytest.skip("no examples in it")
    result = doctest.testfile(str(readme), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0 and result.failed == 0


def imports_of(path, modules):
    """Our modules that a file imports: at the top, for types only, or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules.keys() or {node.module}
    return found & modules.keys()


def test_no_modules_import_each_other():
    """Imports for types and inside functions count: a cycle is a concept in the wrong file."""
    modules = {}
    for package, path in FILES:
        parts = path.relative_to(PACKAGES[package].parent).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    remaining = {name: imports_of(path, modules) - {name} for name, path in modules.items()}
    while free := [name for name, needs in remaining.items() if not needs & remaining.keys()]:
        for name in free:
            del remaining[name]
    assert not remaining


def test_no_test_file_imports_another():
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 40
    for path in files:
        assert not re.search(r"^(from|import) test_", path.read_text(), re.M), path
