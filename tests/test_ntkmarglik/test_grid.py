"""Bounds on a grid: what is averaged, what is guaranteed, what a kill leaves behind, and what is
refused.
"""

import copy
import itertools
import math
import os
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from grids import FEW, ROOT, TINY, tiny

from laplace_marglik import Evidence, GaussianPrior, MarginalLikelihood
from ntkmarglik.problem.augment import ROTATION
from ntkmarglik.problem.data import load
from ntkmarglik.programs.classify.config import parse as parse_run
from ntkmarglik.programs.classify.run import prepare
from ntkmarglik.programs.grid.bound import Bound, bounds_of, exact_bound
from ntkmarglik.programs.grid.config import Grid, parse
from ntkmarglik.programs.grid.evaluate import Evaluator, reference_of, values_of
from ntkmarglik.programs.grid.run import run
from ntkmarglik.programs.grid.table import BOUNDS, NETWORK, read

OTHER = ("kfac", "diag", "blockdiag")
KINDS = ("prior", "rotation")
NAMES = ["structure", "subset", "outputs", "columns", "partition", "root"]


KERNELS = [
    Bound("full", 40, "all"),
    Bound("ntk", 20, "all", partition="class"),
    Bound("ntk", 20, "single", "iid", "random", "paper"),
    Bound("ntk", 20, "single", "shared", "class", "fisher"),
    Bound("ntk", 20, "single", "iid", "random", "symmetric"),
    Bound("ntk", 40, "single", root="eigen"),
]
OTHERS = [
    Bound("full", 20, "all"),
    Bound("ntk", 20, "single", "iid", "class", "paper"),
    Bound("blockdiag", 20, "all"),
    Bound("blockdiag", 40, "single", root="fisher"),
    Bound("kfac", 20, "single", root="paper"),
    Bound("kfac", 40, "all"),
    Bound("diag", 20, "single", root="eigen"),
    Bound("diag", 20, "all", partition="class"),
    Bound("ntk", 20, "single", root="empirical"),
    Bound("kfac", 40, "single", partition="class", root="empirical"),
]


def reference(config, seed=0):
    """A network with weights that are not small, as after training."""
    data = load("digits", "data", n_data=40, seed=config.place.seed)
    problem = prepare(config.run_config(), data)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in problem.model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return reference_of(problem, config)


def values_by_bound(path):
    found = {}
    for row in read(path)[1]:
        found.setdefault(tuple(row[name] for name in NAMES), {})[row["value"]] = row
    return found


@pytest.mark.parametrize("share", [True, False], ids=["shared kernel", "block by block"])
@pytest.mark.parametrize("hyperparameter", KINDS)
def test_a_value_is_the_mean_of_the_marginal_likelihoods_of_all_blocks(hyperparameter, share):
    config = tiny(hyperparameter, "--points", "3")
    ours = reference(config)
    evaluator, data = Evaluator(ours, config, share=share), ours.data
    augment, prior = copy.deepcopy(ours.augment), GaussianPrior(ours.model, "scalar")
    for bound in KERNELS if share else OTHERS:
        ml = MarginalLikelihood(
            ours.model,
            "classification",
            n_data=40,
            prior=prior,
            structure=bound.structure,
            outputs=bound.n_columns,
            columns=bound.columns,
            root=bound.ml_root,
            augment=augment,
        )
        values = values_of(config.grid)[1:]
        for value, ours_there in zip(values, evaluator(bound, values), strict=True):
            with torch.no_grad():
                if hyperparameter == "prior":
                    prior.log_precision.fill_(math.log(value))
                else:
                    augment.eta[ROTATION] = value
                    prior.load_state_dict(ours.prior.state_dict())
            blocks, found = bound.blocks(data, config.place.seed), []
            assert len(blocks) == (40 // bound.subset) * (10 if bound.n_columns == 1 else 1)
            for block in blocks:
                if augment is not None:
                    augment.index = block.index
                found.append(
                    ml(data.x_train[block.index], data.y_train[block.index], block=block).detach()
                )
            want = Evidence.mean(found)
            assert ours_there.status == want.status, bound
            for part in ("total", "log_likelihood", "scatter", "log_det_ratio"):
                torch.testing.assert_close(
                    getattr(ours_there, part), getattr(want, part), rtol=1e-6, atol=1e-6
                )
            if want.standard_error is not None:
                assert ours_there.standard_error == pytest.approx(want.standard_error, rel=1e-5)


@pytest.fixture(scope="module", params=KINDS)
def grid_csv(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    base = [request.param, "--out", str(folder), "--points", "3"]
    run(tiny(*base, "--structures", "ntk", "--columns", "shared", "iid"))
    return run(
        tiny(
            *base,
            "--structures",
            *OTHER,
            "--roots",
            "fisher",
            "--subsets",
            "20",
            "0",
            "--partitions",
            "class",
        )
    )


def test_bounds_lie_below_the_exact_value_everywhere(grid_csv):
    table = values_by_bound(grid_csv)
    exact = table[tuple(str(v) for v in vars(exact_bound(40)).values())]
    compared = 0
    for name, rows in table.items():
        assert len(rows) == 3
        for value, row in rows.items():
            total, limit = float(row["log_marglik"]), float(exact[value]["log_marglik"])
            if row["status"] == "bound":
                compared += 1
                assert total <= limit + 1e-6 * abs(limit), (name, value)
            else:
                assert name[0] == "kfac" or name[-1] == "paper" or row["status"] == "exact"
            # all blocks together hold every datum once, whatever they are
            assert float(row["log_likelihood"]) == pytest.approx(
                float(exact[value]["log_likelihood"])
            )
    assert compared > 80


def test_smaller_blocks_of_the_same_order_are_looser(grid_csv):
    table = values_by_bound(grid_csv)
    checked = 0
    for name, rows in table.items():
        coarser = table.get((name[0], "20", *name[2:]))
        if name[1] == "10" and name[0] != "kfac" and name[-1] != "paper":
            for value, row in rows.items():
                checked += 1
                assert float(row["log_marglik"]) <= float(coarser[value]["log_marglik"]) + 1e-6
    assert checked > 30


def test_the_commands_in_the_file_parse_and_name_no_place(grid_csv):
    commands, rows = read(grid_csv)
    network, *bounds = commands
    assert len(bounds) == 2
    assert parse_run(shlex.split(network.removeprefix(NETWORK))[2:]).run.out is None
    config = parse(shlex.split(bounds[0].removeprefix(BOUNDS))[2:])
    assert config.grid.hyperparameter == rows[0]["hyperparameter"]
    assert not any(str(grid_csv.parent) in command for command in commands)
    assert {row["n_data"] for row in rows} == {"40"}


def test_more_values_need_no_more_passes():
    calls = []
    for points in (2, 50):
        config = tiny("prior", "--points", str(points))
        ours = reference(config)
        count = []
        handle = ours.model.register_forward_hook(lambda *_, count=count: count.append(1))
        for bound in bounds_of(
            Grid(structures=("ntk", "kfac"), subsets=(20,), roots=("eigen",)), 40
        ):
            Evaluator(ours, config, share=False)(bound, values_of(config.grid))
        handle.remove()
        calls.append(len(count))
    assert calls[0] == calls[1] > 0


DYING = """
import os, signal, sys
from ntkmarglik.runs import checkpoint
from ntkmarglik.programs.grid.command import main
whole, left = checkpoint.replace, int(sys.argv[1])
def replace(path, content):
    global left
    left -= path.name == "grid.csv"
    if left == 0:
        path.with_name(path.name + ".partial").write_bytes(content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    whole(path, content)
checkpoint.replace = replace
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("hyperparameter", KINDS)
def test_a_killed_grid_goes_on_to_the_same_file(hyperparameter, tmp_path):
    arguments = [*FEW, "--hyperparameter", hyperparameter]
    whole = run(parse([*arguments, "--out", str(tmp_path / "whole")]))
    command = [sys.executable, "-c", DYING, "2", *arguments, "--out", str(tmp_path / "killed")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = (tmp_path / "killed/grid.csv").read_text()
    killed = run(parse([*arguments, "--out", str(tmp_path / "killed")]))
    assert killed.read_text() == whole.read_text() != before
    assert (
        run(parse([*arguments, "--out", str(tmp_path / "killed")])).read_text() == whole.read_text()
    )


def test_merged_blocks_of_weights_are_tighter(tmp_path):
    flags = [*FEW, "--structures", "blockdiag", "--outputs", "all"]
    values = []
    for number, blocks in enumerate(("tensor", "module", "parent")):
        out = ["--weight-blocks", blocks, "--out", str(tmp_path / blocks)]
        if number:
            out += ["--checkpoint", str(tmp_path / "tensor/reference")]
        _, rows = read(run(parse([*flags, *out])))
        values.append([float(row["log_marglik"]) for row in rows if row["subset"] == "40"])
    for looser, tighter in itertools.pairwise(values):
        assert all(a <= b + 1e-9 for a, b in zip(looser, tighter, strict=True))
    assert values[2][2:] == pytest.approx(values[2][:2])  # one block: all layers of the mlp


def test_other_curvatures_are_kinds_of_roots(tmp_path):
    """They are evaluated once whatever the outputs, with all draws of a datum in one block."""
    flags = [
        *TINY,
        *("--structures", "ntk", "kfac", "--subsets", "10", "0", "--partitions", "random"),
        *("inducing", "--roots", "empirical", "sampled", "--root-samples", "3"),
        *("--points", "2", "--out", str(tmp_path / "grid")),
    ]
    _, rows = read(run(parse(flags)))
    gradients = [row for row in rows if row["root"] in ("empirical", "sampled")]
    assert {row["status"] for row in gradients} == {"approximation"}
    assert len(gradients) == 2 * 2 * 6  # values, roots; plain ntk and kfac, conditioned ntk, sizes
    whole = [row for row in gradients if row["subset"] == "40" and row["partition"] == "random"]
    assert {(row["n_blocks"], row["blocks_used"]) for row in whole} == {("1", "1")}
    again = run(parse([*flags[:-1], str(tmp_path / "again")]))
    assert read(again)[1] == rows


def test_conditioned_blocks_are_a_kind_of_partition(tmp_path):
    """True bounds, tighter than those of independent blocks, where there are rows to condition."""
    flags = [
        *TINY,
        *("--structures", "ntk", "blockdiag", "kfac", "--subsets", "10", "--outputs", "single"),
        *("--partitions", "random", "inducing", "--roots", "paper", "eigen", "--points", "3"),
        *("--blocks", "6", "--out", str(tmp_path / "grid")),
    ]
    _, rows = read(run(parse(flags)))
    conditioned = [row for row in rows if row["partition"] == "inducing"]
    assert {row["structure"] for row in conditioned} == {"ntk", "blockdiag"}
    assert {row["root"] for row in conditioned} == {"eigen"}
    exact = {row["value"]: float(row["log_marglik"]) for row in rows if row["status"] == "exact"}
    for row in conditioned:
        assert row["status"] == "bound"
        error = float(row["standard_error"])
        assert float(row["log_marglik"]) < exact[row["value"]] + 3 * error
