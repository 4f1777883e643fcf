"""The grid's program as its users meet it: second commands, checkpoints, estimates, refusals,
figures.
"""

import csv
import re
import shlex

import pytest
from grids import FEW, ROOT, TINY, tiny

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.machine.speed import Speed
from ntkmarglik.programs.classify import run as classify
from ntkmarglik.programs.grid.bound import bounds_of, exact_bound
from ntkmarglik.programs.grid.command import main
from ntkmarglik.programs.grid.config import Grid, GridConfig, parse
from ntkmarglik.programs.grid.run import is_complete, run
from ntkmarglik.programs.grid.table import BOUNDS, read
from ntkmarglik.programs.paper.figures import bound_slack


def test_a_second_command_adds_its_rows_and_its_name(tmp_path, capsys):
    base = [*TINY, "--out", str(tmp_path), "--points", "2", "--no-exact", "--structures"]
    assert main([*base, "diag", "--outputs", "all"]) == 0
    first = read(tmp_path / "grid.csv")[1]
    assert main([*base, "kfac", "--outputs", "all"]) == 0
    commands, rows = read(tmp_path / "grid.csv")
    assert rows[: len(first)] == first and len(rows) == 2 * len(first) and len(commands) == 3
    before = (tmp_path / "grid.csv").read_text()
    for change in (["--points", "3"], ["--lr", "0.5"], ["--n-data", "41"]):
        assert main([*base, "diag", *change]) == 2
        assert re.search(r"other (results|settings)|was started with", capsys.readouterr().err)
    assert (tmp_path / "grid.csv").read_text() == before


def test_the_network_of_a_checkpoint_gives_the_same_rows(tmp_path, capsys):
    assert main([*FEW, "--out", str(tmp_path / "a")]) == 0
    given = ["--checkpoint", str(tmp_path / "a/reference")]
    assert main([*FEW, "--out", str(tmp_path / "b"), *given]) == 0
    (network, *_), rows = read(tmp_path / "a/grid.csv")
    assert (
        read(tmp_path / "b/grid.csv")[1] == rows and read(tmp_path / "b/grid.csv")[0][0] == network
    )
    assert main([*FEW, *given, "--n-data", "30"]) == 2
    assert "--n-data 40" in capsys.readouterr().err
    assert main([*FEW, "--checkpoint", str(tmp_path)]) == 2
    assert "folder of a finished run" in capsys.readouterr().err


def test_bounds_are_those_of_temperature_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ntkmarglik.programs.classify.pictures.draw", lambda *_, **__: None)
    warm = parse(FEW).run_config().updated(out=tmp_path / "warm", temperature=2.0)
    classify.run(warm)
    assert main([*FEW, "--checkpoint", str(tmp_path / "warm")]) == 2
    assert "another --temperature than 1" in capsys.readouterr().err


def test_some_blocks_only(tmp_path):
    path = run(
        tiny(
            "prior",
            "--blocks",
            "3",
            "--out",
            str(tmp_path),
            "--structures",
            "ntk",
            "--roots",
            "eigen",
        )
    )
    used = {(row["subset"], row["outputs"]): int(row["blocks_used"]) for row in read(path)[1]}
    assert used == {
        ("40", "all"): 1,
        ("10", "all"): 3,
        ("20", "all"): 2,
        ("10", "single"): 3,
        ("20", "single"): 3,
        ("40", "single"): 3,
    }


def test_a_dry_run_estimates_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*FEW, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "full-40-C" in out and re.search(r"\d+ bounds at 2 values: about \d+ s", out)
    assert not list(tmp_path.iterdir())


def test_estimates_count_what_is_done_to_matrices():
    speed = Speed(decompose=1.0, multiply=2.0, copy=0.0)
    kernel = 0.5 * 2 * 10 * 12 * 10 + 10**3  # half of R R^T, and its Cholesky factor
    assert speed.algebra("ntk", 10, (8, 4)) == speed.algebra("full", 10, (8, 4)) == kernel
    assert speed.algebra("full", 10, (3, 4)) == 2 * 10 * 7 * 7 + 7**3  # fewer weights than rows
    parts = [2 * 10 * 8 * 8 + 8**3, 0.5 * 2 * 10 * 20 * 10 + 10**3]
    assert speed.algebra("blockdiag", 10, (8, 20)) == sum(parts)
    assert speed.algebra("kfac", 10, (8, 4)) == 0


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--subsets 41", "--subsets 41.*40"),
        ("--points 0", "--points"),
        ("--blocks -1", "--blocks"),
        ("--roots", "--roots"),
        ("--dataset digit", "Did you mean 'digits'"),
        ("--memory-budget 1e-6 --structures ntk", "leave S = 10 out of --subsets"),
        ("--epochs 0", "--epochs"),
    ],
)
def test_mistakes_are_explained(flags, words, tmp_path, capsys):
    assert main([*TINY, "--out", str(tmp_path / "new"), *shlex.split(flags)]) == 2
    assert re.search(words, capsys.readouterr().err)
    assert not (tmp_path / "new/grid.csv").exists()


def test_an_exact_value_that_does_not_fit_is_left_out(tmp_path, capsys):
    flags = [
        "--structures",
        "diag",
        "--outputs",
        "all",
        "--subsets",
        "10",
        "--memory-budget",
        "3e-3",
    ]
    arguments = [*TINY, *flags, "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "exact value is left out" in capsys.readouterr().err
    assert {row["structure"] for row in read(tmp_path / "grid.csv")[1]} == {"diag"}


def test_settings_survive_the_command_line_and_files(tmp_path):
    config = GridConfig().updated(
        structures=("kfac",), subsets=(10, 0), exact=False, out=tmp_path, lr=0.5
    )
    assert parse(config.arguments()) == config
    (tmp_path / "grid.yaml").write_text("structures: [kfac, diag]\nsubsets: [10]\npoints: 7\n")
    grid = parse(["--config", str(tmp_path / "grid.yaml"), "--points", "8"]).grid
    assert (grid.structures, grid.subsets, grid.points) == (("kfac", "diag"), (10,), 8)


def test_every_combination_appears_once():
    bounds = bounds_of(Grid(columns=("shared", "iid")), 1000)
    assert len(set(bounds)) == len(bounds) and bounds[0] == exact_bound(1000)
    assert len({str(b) for b in bounds}) == len(bounds)
    with pytest.raises(NtkMarglikError, match="--roots"):
        bounds_of(Grid(roots=()), 1000)


def test_other_files_are_not_taken_for_a_grid(tmp_path):
    with (tmp_path / "other.csv").open("w", newline="") as file:
        csv.writer(file).writerow(["a", "b"])
    with pytest.raises(NtkMarglikError, match="not a file of bound_grid"):
        read(tmp_path / "other.csv")
    with pytest.raises(NtkMarglikError, match="cannot be read"):
        read(tmp_path / "absent.csv")


def test_figures_are_drawn_and_say_what_is_missing(tmp_path):
    data = ROOT / "illustrations" / "data"
    with pytest.raises(NtkMarglikError, match=r"bound_grid\.py makes such files"):
        bound_slack.FIGURES["bounds_ntk"](tmp_path, tmp_path / "figure.png")
    for name in [name for name in bound_slack.FILES if (data / name).exists()]:
        commands, _ = read(data / name)
        for command in commands[1:]:
            assert parse(shlex.split(command.removeprefix(BOUNDS))[2:]).place.out is None
        text = (data / name).read_text().splitlines()
        (tmp_path / name).write_text(
            "\n".join(line for line in text if line.startswith(("#", "hyper")) or ",full," in line)
        )
    for draw in bound_slack.FIGURES.values():
        with pytest.raises(NtkMarglikError, match="no rows for this figure"):
            draw(tmp_path, tmp_path / "figure.png")


def test_curves_are_ordered_by_the_size_of_blocks_whatever_the_file(monkeypatch, tmp_path):
    name = bound_slack.FILES[0]
    text = (ROOT / "illustrations" / "data" / name).read_text().splitlines()
    head = [line for line in text if line.startswith(("#", "hyper"))]
    (tmp_path / name).write_text("\n".join([*head, *reversed(text[len(head) :])]))
    seen: list[list[str]] = []
    panel = bound_slack._panel
    monkeypatch.setattr(
        bound_slack, "_panel", lambda *given: seen.append(found := panel(*given)) or found
    )
    for folder in (ROOT / "illustrations" / "data", tmp_path):
        bound_slack.FIGURES["bounds_ntk"](folder, tmp_path / "figure.png")
    colours = {label: colour for _, label, colour in seen[0]}
    assert colours == {label: colour for _, label, colour in seen[-1]} and len(
        set(colours.values())
    ) == len(colours)


@pytest.mark.parametrize("damage", ["cut", "doubled", "digit", "not a number"])
def test_damaged_rows_are_evaluated_again(damage, tmp_path, capsys):
    flags = [*FEW, "--structures", "diag", "--out", str(tmp_path)]
    assert main(flags) == 0
    path = tmp_path / "grid.csv"
    whole = path.read_bytes()
    *lines, last = whole.decode().splitlines()
    fields = last.split(",")
    fields[-3] = {"digit": "-123.4", "not a number": "nan"}.get(damage, fields[-3])
    changed = {"cut": [*lines, last[: len(last) // 2]], "doubled": [*lines, last, last]}
    path.write_text("\n".join(changed.get(damage, [*lines, ",".join(fields)])) + "\n")
    assert is_complete(parse(flags)) is (damage == "doubled")
    assert main(flags) == 0
    said = capsys.readouterr().err
    assert "1 damaged or doubled lines" in said
    assert read(path) == (read(path)[0], csv_rows(whole))


def csv_rows(content):
    lines = content.decode().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a,b\n1,2\n", b"# network: x\n# bounds: rm -rf"])
def test_a_file_of_something_else_is_refused_and_kept(content, tmp_path, capsys):
    (tmp_path / "grid.csv").write_bytes(content)
    assert main([*FEW, "--structures", "diag", "--out", str(tmp_path)]) == 2
    assert str(tmp_path / "grid.csv") in capsys.readouterr().err
    assert (tmp_path / "grid.csv").read_bytes() == content
