"""How the code reads: expressions per line, long functions, and the files one estimate visits.

python benchmarks/house.py

A guide for readers of diffs, not a gate: a line that moves a number without helping a reader is a
defect. The walk is the second call of `ml(x, y)` on a small network, its plan being known:
functions of our packages entered, files visited, and changes of file between them.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asdl_marglik import STRUCTURES
from laplace_marglik import GaussianPrior, MarginalLikelihood

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "asdl_marglik": ROOT / "dependencies/asdl/asdl_marglik",
    "laplace_marglik": ROOT / "dependencies/laplace/laplace_marglik",
    "ntkmarglik": ROOT / "ntkmarglik",
}
LONGEST = 40  # lines of a function


def density(folder: Path) -> float:
    """Expression nodes per line of code, docstrings, comments and blank lines not counted."""
    nodes = lines = 0
    for path in folder.rglob("*.py"):
        tree = ast.parse(path.read_text())
        documented = _docstring_lines(tree)
        nodes += sum(isinstance(node, ast.expr) for node in ast.walk(tree))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            lines += bool(line.strip()) and line.strip()[0] != "#" and number not in documented
    return nodes / lines


def _docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found |= _lines(node)
    return found


def _lines(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def long_functions(folder: Path) -> list[str]:
    """Functions of more than LONGEST lines, docstrings not counted, as `file:line name`."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = _lines(node)
                if ast.get_docstring(node) is not None:
                    lines -= _lines(node.body[0])
                if len(lines) > LONGEST:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    return found


def walk(call: Callable[[], Any]) -> tuple[int, int, int]:
    """Functions of ours entered by a call, files visited, and changes of file."""
    entered: list[tuple[str, str]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        ours = any(str(folder) in code.co_filename for folder in PACKAGES.values())
        if event == "call" and ours and not code.co_name.startswith("<"):
            entered.append((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    once = list(dict.fromkeys(entered))
    changes = sum(a[0] != b[0] for a, b in itertools.pairwise(once))
    return len(once), len({file for file, _ in once}), changes


def estimate(structure: str) -> Callable[[], Any]:
    """A second estimate with its gradient, of a small convolutional network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    prior = GaussianPrior(model)
    ml = MarginalLikelihood(
        model, "classification", n_data=20, prior=prior, structure=structure, outputs=1
    )
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8) % 3
    ml(x, y).total.backward()
    return lambda: ml(x, y).total.backward()


def main() -> None:
    print("expressions per line of code")
    for name, folder in PACKAGES.items():
        print(f"  {name:<16} {density(folder):.2f}")
    print(f"functions of more than {LONGEST} lines")
    for name, folder in PACKAGES.items():
        found = long_functions(folder)
        print(f"  {name:<16} {len(found)} {', '.join(found)}".rstrip())
    print("functions / files / changes of file of one estimate")
    for structure in STRUCTURES:
        print(f"  {structure:<16} {' / '.join(map(str, walk(estimate(structure))))}")


if __name__ == "__main__":
    main()
