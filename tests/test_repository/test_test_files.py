"""Tests of the two libraries are found from the name of what they test, and the other way round."""

import re

import pytest
from programs import ROOT

import asdl_marglik
import laplace_marglik

LIBRARIES = {
    "test_asdl_marglik": (asdl_marglik, ROOT / "dependencies/asdl/asdl_marglik"),
    "test_laplace_marglik": (laplace_marglik, ROOT / "dependencies/laplace/laplace_marglik"),
}
# files that tell a story across modules, each with what it is about
STORIES = {
    "test_conditioned_theory": "bounds of conditioned blocks, through partition and evidence",
}
FILES = [path for name in LIBRARIES for path in sorted((ROOT / "tests" / name).glob("test_*.py"))]


def snake_case(name):
    """GaussianPrior -> gaussian_prior, DataEmphasizedELBO -> data_emphasized_elbo."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def names_in(library, folder):
    """Modules, packages and public names."""
    modules = {path.stem for path in folder.rglob("*.py") if path.stem != "__init__"}
    packages = {path.parent.name for path in folder.rglob("__init__.py")}
    return modules | packages | {snake_case(name) for name in library.__all__}


def subject_of(path):
    """The longest name that the name of a test file is or begins with, if there is one."""
    stem = path.stem.removeprefix("test_")
    names = names_in(*LIBRARIES[path.parent.name])
    found = [name for name in names if stem == name or stem.startswith(f"{name}_")]
    return max(found, key=len, default=None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_test_file_names_what_it_tests(path):
    assert subject_of(path) is not None or path.stem in STORIES, (
        f"{path.stem} names no module, package or public name of its library; rename it, or say "
        "in STORIES what it is about"
    )


def test_names_that_mean_nothing_are_told_apart():
    folder = ROOT / "tests/test_laplace_marglik"
    assert subject_of(folder / "test_hygiene.py") is None
    assert subject_of(folder / "test_use.py") is None
    assert subject_of(folder / "test_marginal_likelihood_misuse.py") == "marginal_likelihood"
    assert subject_of(folder / "test_gaussian_prior.py") == "gaussian_prior"


def test_no_two_test_files_have_the_same_name():
    """pytest imports them by their names alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
