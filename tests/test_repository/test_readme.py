"""Every command a document shows goes through the real parser, and the examples of the README
run.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run

from ntkmarglik.programs.classify.config import Config, parse
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.finetune.config import parse as parse_finetune
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.programs.grid.config import parse as parse_grid
from ntkmarglik.programs.paper.figures import NUMBERS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for part in (".", "docs", "docs/tutorials", "benchmarks", "illustrations", "examples")
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


def blocks(language, documents):
    """The fenced blocks of a language."""
    texts = [path.read_text() for path in documents]
    return [
        block
        for text in texts
        for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)
    ]


# pages made of parts of programs that have tests of their own, and one that registers things
PARTS = {ROOT / "docs/how_it_works.md", *(ROOT / "docs/tutorials").glob("*.md")}
REGISTERS = ROOT / "docs/extending.md"
WHOLE = [path for path in DOCUMENTS if path not in PARTS | {REGISTERS, ROOT / "README.md"}]


def same_words(printed, shown, tolerance=None):
    """Whether two texts have the same words, and numbers within a relative tolerance."""
    number = r"(?<![\w.])-?\d+\.?\d*(?:e-?\d+)?"
    words = [re.sub(number, "#", text).split() for text in (printed, shown)]
    values = [[float(found) for found in re.findall(number, text)] for text in (printed, shown)]
    assert words[0] == words[1]
    assert tolerance is None or values[0] == pytest.approx(values[1], rel=tolerance)


def test_words_and_numbers_are_compared():
    same_words("decay 1.0e-03 of a1", "decay 1.1e-03 of a1", 0.2)
    same_words("decay 1.0", "decay 7")
    for printed, tolerance in (("decay 2.0", 0.2), ("delay 1.0", None)):
        with pytest.raises(AssertionError):
            same_words(printed, "decay 1.0", tolerance)


def test_the_readme_prints_what_it_says(monkeypatch, capsys):
    """In full: another machine rounds differently, and learns nearly the same."""
    monkeypatch.chdir(ROOT)
    (code,) = blocks("python", [ROOT / "README.md"])
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    same_words(capsys.readouterr().out, blocks("text", [ROOT / "README.md"])[0], 0.3)


def shell_lines(document):
    """Every command of the fenced blocks for a shell."""
    lines = "".join(blocks("bash", [document])).splitlines()
    return [part.strip() for line in lines for part in line.split("&&")]


def check_install(words):
    """The files and extras that a line of pip names are there."""
    extras = (ROOT / "pyproject.toml").read_text()
    targets = [word for word in words if not word.startswith("-")]
    for target in targets:
        name, _, extra = target.partition("[")
        assert (ROOT / name).exists()
        assert not extra or f"\n{extra.rstrip(']')} = [" in extras


def test_every_command_of_the_readme_works(tmp_path):
    """At a small size. The line of all tests is the one that CI runs."""
    small = "--epochs 2 --burnin 1 --frequency 1 --n-data 60 --subset 30 --batch-size 30"
    for line in shell_lines(ROOT / "README.md"):
        words = shlex.split(line)
        if words[:2] == ["pip", "install"]:
            check_install(words[2:])
        elif words[:3] == ["python", "-m", "pytest"]:
            assert line in (ROOT / "CONTRIBUTING.md").read_text()
        else:
            command = [ROOT / words[1], *words[2:], *shlex.split(small)]
            printed = run(*command, cwd=tmp_path)
            (folder,) = (tmp_path / "runs").iterdir()
            assert "ntk-30-1" in folder.name and (folder / "report.html").exists()
            assert "baseline" in printed


def test_the_readme_can_be_read():
    """130 lines or so, of 100 columns; but a line to be copied stays whole."""
    lines = (ROOT / "README.md").read_text().splitlines()
    long = [line for line in lines if len(line) > 100]
    assert len(lines) <= 140 and all(line.startswith("pip install") for line in long)


def test_extending_prints_what_it_says():
    """In a process of its own: what is registered would stay in this one."""
    code = "\n".join(blocks("python", [REGISTERS]))
    done = subprocess.run(
        [sys.executable, "-"], input=code, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    same_words(done.stdout, "".join(blocks("text", [REGISTERS])), 0.1)


@pytest.mark.parametrize(
    "code", blocks("python", WHOLE), ids=lambda code: f"{len(code.splitlines())} lines"
)
def test_python_examples_run(code, monkeypatch, capsys):
    """Loops over a number of epochs make their last one only."""
    monkeypatch.chdir(ROOT)
    short = re.sub(r"range\((\d+)\)", lambda found: f"range({int(found[1]) - 1}, {found[1]})", code)
    exec(compile(short, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert bool(printed) == ("print(" in code) and "nan" not in printed
