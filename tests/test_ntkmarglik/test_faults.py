"""Whatever happens to a program, nothing is lost: it ends in the numbers it would have had, or says
in a sentence why not, and the next command brings it to its end.

CI has a few faults of every kind; `pytest -m slow -s` has all of them, and prints the table of
docs/reliability.md.
"""

import collections
import random
import shutil

import pytest
from faults import FAULTS, folder_of, inject
from grids import FEW
from tiny_runs import TINY, results

from ntkmarglik.programs.classify.command import main
from ntkmarglik.programs.grid.table import read
from ntkmarglik.runs.folder import RunFolder

EAGER = ["--checkpoint-seconds", "0", "--threads", "1"]
SHORT = [*TINY, "--epochs", "2", "--predict", "none", "--no-baseline", *EAGER]
DAMAGED = [*TINY, "--predict", "none", "--no-baseline", *EAGER]
LONG = [*TINY, "--augment", "affine", "--epochs", "4", "--predict", "none", *EAGER]
GRID = [*FEW, "--structures", "diag"]
ENDS = {0, 2, 75}  # what a program may end with unless it is killed


def sentence(said):
    """Whether the end of a program is explained to its user."""
    return "Traceback" not in said and "error: " in (line[:7] for line in said.splitlines())


def check(program, arguments, faults, place, whole):
    """No fault may change a number or leave a program without a word; returns their kinds.

    whole: what the results in a run folder are; they must be those of a run without faults.
    """
    none, *reports = inject(program, arguments, faults, place)
    assert none["codes"] == [0], none["said"]
    expected = whole(folder_of(place, "none", 0))
    held = collections.Counter()
    for report in reports:
        first, second = report["said"]
        killed = report["kind"] == "kill"
        assert set(report["codes"]) <= ({-9} if killed else ENDS), report
        assert "Traceback" not in first + second, report
        if not killed and any(report["codes"]):
            assert sentence(first), report
        assert report["second"] == 0, report
        folder = folder_of(place, report["kind"], report["number"])
        assert whole(folder) == expected, report
        assert not list(folder.rglob("*.partial")), report
        held[report["kind"]] += 1
    return held


A_FEW = [
    *(("kill", share) for share in (0.4, 0.95)),
    *(("full", 0.5), ("passing", 0.3), ("read-only", 0), ("size", 6), ("memory", 1), ("two", 0)),
]
ALL = [
    *((kind, "each") for kind in ("kill", "full", "passing")),
    # not less: what a program says goes to a file as well
    *(("size", kilobytes) for kilobytes in (4, 6, 8, 16, 32, 64)),
    *(("memory", megabytes) for megabytes in (1, 4, 16, 64, 256)),
    *(("read-only", 0), ("two", 0), ("two", 1), ("two", 2)),
]


def rows(folder):
    """What a grid and its network computed."""
    return read(folder / "grid.csv")[1], results(folder / "reference")


def test_a_few_faults_of_every_kind(tmp_path):
    held = check("classify", SHORT, A_FEW, tmp_path, results)
    assert held.keys() == FAULTS.keys()


def test_a_few_faults_of_a_grid(tmp_path):
    check("grid", GRID, [("kill", 0.9), ("full", 0.5), ("two", 0)], tmp_path, rows)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["classify", "grid"])
def test_every_fault(program, tmp_path, capsys):
    arguments, whole = {"classify": (LONG, results), "grid": (GRID, rows)}[program]
    held = check(program, arguments, ALL, tmp_path, whole)
    with capsys.disabled():
        print()
        for kind, number in held.items():
            print(f"| {program}: {FAULTS[kind]} | {number} | {number} |")


DAMAGES = {
    "deleted": lambda content, _: None,
    "emptied": lambda content, _: b"",
    "cut": lambda content, rng: content[: rng.randrange(1, len(content))],
    "doubled": lambda content, _: content + content,
    "noise": lambda content, rng: rng.randbytes(len(content)),
    "zeros": lambda content, _: bytes(len(content)),
    "bit": lambda content, rng: _flipped(content, rng.randrange(8 * len(content))),
    "line": lambda content, rng: _without_line(content, rng),
}
FILES = ("config.yaml", "metrics.jsonl", "summary.json", "checkpoint.pt", "checkpoint.previous.pt")


def _flipped(content, place):
    changed = bytearray(content)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)


def _without_line(content, rng):
    lines = content.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished and an interrupted run, and what both compute in the end."""
    place = tmp_path_factory.mktemp("runs")
    save = RunFolder.save
    saves = []

    def interrupted(self, state):
        save(self, state)
        saves.append(self)
        if len(saves) == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)
        assert main([*DAMAGED, "--out", str(place / "finished")]) == 0
        patch.setattr(RunFolder, "save", interrupted)
        assert main([*DAMAGED, "--out", str(place / "interrupted")]) == 130
    return place, results(place / "finished")


def resume_damaged(runs, state, damage, name, place, capsys, seed=0):
    """Resume a run with a damaged file; returns whether it came to its end."""
    source, expected = runs
    folder = place / f"{state}-{damage}-{name}-{seed}"
    shutil.copytree(source / state, folder)
    path = folder / name
    content = DAMAGES[damage](path.read_bytes(), random.Random(f"{damage}{name}{seed}"))
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    damaged = {file.name: file.read_bytes() for file in folder.iterdir()}
    code = main([*DAMAGED, "--out", str(folder), "--resume"])
    said = capsys.readouterr().err
    assert code in ENDS and "Traceback" not in said, said
    if code == 0:
        assert results(folder) == expected, said
    else:
        assert sentence(said), said
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == damaged
    return code == 0


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch):
    monkeypatch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_a_run_with_a_damaged_file_comes_to_its_end(runs, state, name, tmp_path, capsys):
    """One file is damaged: the others have all that is needed."""
    if state == "interrupted" and name == "summary.json":
        return  # there is none yet
    damages = random.Random(f"{state}{name}").sample(sorted(DAMAGES), 2)
    for damage in damages:
        assert resume_damaged(runs, state, damage, name, tmp_path, capsys)


@pytest.mark.slow
def test_every_damage_of_every_file(runs, tmp_path, capsys):
    held = collections.Counter()
    for state in ("finished", "interrupted"):
        for name in FILES:
            if (runs[0] / state / name).exists():
                for damage in DAMAGES:
                    seeds = 20 if damage in ("cut", "bit", "line") else 1
                    for seed in range(seeds):
                        assert resume_damaged(runs, state, damage, name, tmp_path, capsys, seed)
                        held[name] += 1
    with capsys.disabled():
        print()
        for name, number in held.items():
            print(f"| {name}: {', '.join(DAMAGES)} | {number} | {number} |")
