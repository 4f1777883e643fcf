"""What programs import before they need it: a mistyped flag does not wait for torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = ["classification_image.py"]
PROGRAMS = {
    "runner": RUNNER,
    "command": ["-m", "ntkmarglik", "run"],
    "grid": ["scripts/bound_grid.py"],
    "finetune": ["scripts/finetune.py"],
}


def started(*arguments):
    """The exit code of a program, what it said, and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    timed = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip() for line in timed}
    assert "ntkmarglik.settings" in modules
    said = done.stdout + done.stderr
    return done.returncode, said, modules


def large(modules):
    """Those of some modules that take long to import."""
    return modules & {"torch", "numpy", "sklearn", "scipy", "matplotlib", "bokeh", "transformers"}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_mistyped_flag_is_refused_without_torch(program):
    code, said, modules = started(*program, "--nosuchflag")
    assert code == 2 and "--nosuchflag" in said
    assert not large(modules)


def test_help_is_shown_without_torch():
    code, said, modules = started(*RUNNER, "--help")
    assert code == 0 and "ntk-conditioned" in said and "resnet_norm" in said
    assert not large(modules)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--preset", "list"], "paper-cifar"),
        (["--preset", "paper-cifra"], "No preset is named"),
        (["--method", "kfax"], "kfac"),
    ],
    ids=["presets", "preset", "method"],
)
def test_names_are_known_without_torch(flags, words):
    _, said, modules = started(*RUNNER, *flags)
    assert words in said
    assert not large(modules)


AT_THE_FIRST_STEP = """
import sys
from ntkmarglik.learn.methods.mode import AtMode
from ntkmarglik.programs.classify.command import main

class FirstStep(BaseException):
    pass

def loss(self, x, y):
    raise FirstStep

AtMode.loss = loss
try:
    main(sys.argv[1:])
except FirstStep:
    print(*sys.modules)
"""


def test_training_begins_before_what_draws_and_shows_is_imported(tmp_path):
    """And without scikit-learn, which takes as long as torch to read a file of digits."""
    flags = ["--method", "ntk", "--subset", "500", "--outputs", "1", "--out", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_FIRST_STEP, *flags], cwd=ROOT, capture_output=True, text=True
    )
    modules = set(done.stdout.split())
    assert "torch" in modules, done.stderr
    assert large(modules) <= {"torch", "numpy"}
    assert not modules & {"pandas", "pyarrow", "PIL", "rich"}
