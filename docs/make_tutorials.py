"""Tutorial pages are made of programs: code copied from the source, output from runs of it.

python docs/make_tutorials.py             fill all pages from the sources and the stored outputs
python docs/make_tutorials.py own_loop    run examples/own_loop.py, store its output, then fill

A page has a comment where code or output belongs, and what follows it is written by this program:

    <!-- code: examples/own_loop.py | prior = | learner.attach -->     from a line to a line
    <!-- code: dependencies/asdl/asdl_marglik/naive.py | log_det -->   a function
    <!-- output: own_loop -->                                          what the program printed
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "docs/tutorials"
PAGES = (*sorted(TUTORIALS.glob("*.md")), ROOT / "docs/how_it_works.md")
FILLED = re.compile(
    r"(?P<mark><!-- (?P<kind>code|output): (?P<what>[^\n]*?) -->\n)(```[^\n]*\n.*?^```\n)?",
    re.M | re.S,
)


def digest(program: Path) -> str:
    """What tells one version of a program from another."""
    return hashlib.sha256(program.read_bytes()).hexdigest()[:16]


def output_of(name: str) -> tuple[str, str]:
    """The digest of the program that was run, and what it printed."""
    first, _, text = (TUTORIALS / f"outputs/{name}.txt").read_text().partition("\n")
    return first.rpartition(" ")[2], text


def code_of(path: str, *place: str) -> str:
    """A function of a file, or its lines from one that begins with a text to one with another."""
    lines = (ROOT / path).read_text().splitlines()
    if len(place) == 1:
        for node in ast.parse("\n".join(lines)).body:
            if getattr(node, "name", None) == place[0]:
                return "\n".join(lines[node.lineno - 1 : node.end_lineno])
        raise SystemExit(f"{path} has no function {place[0]}")
    begins, ends = (
        [i for i, line in enumerate(lines) if line.lstrip().startswith(text)] for text in place
    )
    ends = [i for i in ends if begins and i >= begins[0]]
    if not ends:
        raise SystemExit(f"{path} has no lines from {place[0]!r} to {place[1]!r}")
    return "\n".join(lines[begins[0] : ends[0] + 1])


def filled(text: str) -> str:
    """The page with the code and the outputs of today."""

    def fill(found: re.Match) -> str:
        if found["kind"] == "output":
            return f"{found['mark']}```text\n{output_of(found['what'])[1]}```\n"
        code = code_of(*(part.strip() for part in found["what"].split("|")))
        return f"{found['mark']}```python\n{code}\n```\n"

    return FILLED.sub(fill, text)


def run(name: str) -> None:
    """Run a program at its full size, and keep what it prints and draws."""
    program = ROOT / f"examples/{name}.py"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(program)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        shutil.copy(Path(folder) / f"{name}.png", TUTORIALS / f"pictures/{name}.png")
    head = f"# python examples/{name}.py of sha256 {digest(program)}\n"
    (TUTORIALS / f"outputs/{name}.txt").write_text(head + done.stdout)


def main() -> None:
    """Run the programs that are named, then fill all pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="programs of examples/ to run again")
    for name in parser.parse_args().names:
        run(name)
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
