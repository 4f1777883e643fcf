"""Every example runs, at a small size, in a process of its own as a user would start it, and prints
what its tutorial shows.
"""

import os
import re
import subprocess
import sys

import pytest
from programs import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# what each needs beside the runner, and epochs enough for its first round
NEEDS = {
    "hugging_face_trainer": ("transformers", "accelerate"),
    "lightning_trainer": ("lightning",),
    "lora": ("peft", "accelerate"),
}
EPOCHS = {"hugging_face_trainer": 11, "lightning_trainer": 12, "learned_augmentation": 7}


def without_numbers(text):
    """The words of a printed text, line by line; what a program prints at any size."""
    return [re.sub(r"[-\d.]+(e-?\d+)?", "#", line).split() for line in text.splitlines()]


def test_there_are_examples():
    assert len(EXAMPLES) >= 5
    assert {*NEEDS, *EPOCHS} <= {path.stem for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_fits_on_a_page(path):
    assert len(path.read_text().splitlines()) <= 80


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path):
    for name in NEEDS.get(path.stem, ()):
        pytest.importorskip(name)
    figure = tmp_path / "figure.png"
    epochs = str(EPOCHS.get(path.stem, 2))
    done = subprocess.run(
        [sys.executable, str(path), "--epochs", epochs, "--figure", str(figure)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert figure.stat().st_size > 5_000
    shown = (ROOT / f"docs/tutorials/outputs/{path.stem}.txt").read_text().partition("\n")[2]
    # all but the last line, which has the path of the figure
    assert without_numbers(done.stdout)[:-1] == without_numbers(shown)[:-1]
