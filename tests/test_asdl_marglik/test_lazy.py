"""Names are known before what they stand for is imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import asdl_marglik
import laplace_marglik
from asdl_marglik.lazy import Later

PACKAGES = pytest.mark.parametrize("package", [asdl_marglik, laplace_marglik])


def imported_by(program):
    """Modules that a program has imported at its end."""
    program = f"{program}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_names_of_structures_do_not_need_torch():
    found = imported_by("from asdl_marglik import STRUCTURES\nimport laplace_marglik")
    assert "asdl_marglik.curvature.structure" in found and "torch" not in found


@PACKAGES
def test_what_the_stub_exports_is_what_the_package_has(package):
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    (exported,) = [node.value for node in stub.body if isinstance(node, ast.Assign)]
    assert sorted(ast.literal_eval(exported)) == package.__all__
    assert set(package.__all__) <= set(dir(package))


@PACKAGES
def test_a_name_is_found_once_and_an_unknown_one_is_no_attribute(package):
    name = package.__all__[0]
    assert getattr(package, name) is vars(package)[name]
    with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'nothing'"):
        _ = package.nothing
    assert not hasattr(package, "__wrapped__")


def test_modules_of_a_package_are_its_attributes():
    program = "import asdl_marglik\nassert asdl_marglik.linalg.psd_sqrt is asdl_marglik.psd_sqrt"
    assert "asdl_marglik.linalg" in imported_by(program)


def test_a_function_is_called_with_its_arguments():
    assert Later("math:isclose")(1.0, 1.1, rel_tol=0.2)
    with pytest.raises(ModuleNotFoundError):
        Later("asdl_marglik.nowhere:isclose")()
