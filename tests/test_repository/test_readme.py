"""Every command a document shows goes through the real parser, and the examples of the README
run.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ntkmarglik.programs.classify.config import Config, parse
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.finetune.config import parse as parse_finetune
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.programs.grid.config import parse as parse_grid
from ntkmarglik.programs.paper.figures import NUMBERS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for part in (".", "docs", "benchmarks", "illustrations")
    for path in ROOT.glob(f"{part}/*.md")
)
SCRIPT = "python classification_image.py"
PARSERS = {
    SCRIPT: (parse, Config),
    "python scripts/bound_grid.py": (parse_grid, GridConfig),
    "python scripts/finetune.py": (parse_finetune, FinetuneConfig),
}


def commands(text):
    """The programs' commands in fenced blocks, continued lines joined, and nothing else of a chain
    of commands.
    """
    found = []
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|;|\|", line.removeprefix("$ ")):
                if part.strip().startswith(tuple(PARSERS)):
                    found.append(part.strip())
    return found


COMMANDS = [
    (path.relative_to(ROOT), command)
    for path in DOCUMENTS
    for command in commands(path.read_text())
]


def test_commands_are_found():
    text = (
        f"```bash\npip install x && {SCRIPT} --method map \\\n  --epochs 3  # comment\n```\n"
        f"{SCRIPT} --not-fenced\n"
    )
    assert [shlex.split(c, comments=True)[2:] for c in commands(text)] == [
        ["--method", "map", "--epochs", "3"]
    ]


@pytest.mark.parametrize("document, command", COMMANDS, ids=str)
def test_the_parser_takes_it(document, command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # files of --config are named from there
    arguments = shlex.split(command, comments=True)[2:]
    parser, kind = next(found for script, found in PARSERS.items() if command.startswith(script))
    if arguments == ["--help"]:
        with pytest.raises(SystemExit, match="0"):
            parser(arguments)
    else:
        assert isinstance(parser(arguments), kind)


def test_the_commands_of_tables_and_figures_exist():
    text = (ROOT / "illustrations/README.md").read_text()
    named = [
        shlex.split(part)
        for found in re.findall(r"`(python [^`]+)`", text)
        for part in re.split(r"&&|>", found)
    ]
    programs = [words for words in named if words[0] == "python"]
    assert len(programs) > 10 and all((ROOT / words[1]).exists() for words in programs)
    shown = {
        n
        for words in programs
        if "--figures" in words
        for n in words[words.index("--figures") + 1 :]
    }
    assert shown == set(NUMBERS)


def blocks(language):
    texts = [path.read_text() for path in DOCUMENTS]
    return [
        block
        for text in texts
        for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    ]


def test_the_site_is_built_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "estimators/index.html").exists() and (
        tmp_path / "illustrations/bounds_ntk.png"
    ).exists()


@pytest.mark.parametrize(
    "code", blocks("python"), ids=lambda code: f"{len(code.splitlines())} lines"
)
def test_python_examples_run(code, monkeypatch, capsys):
    """Loops over a number of epochs make their last one only."""
    monkeypatch.chdir(ROOT)
    short = re.sub(r"range\((\d+)\)", lambda found: f"range({int(found[1]) - 1}, {found[1]})", code)
    exec(compile(short, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert bool(printed) == ("print(" in code) and "nan" not in printed
