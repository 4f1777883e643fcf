"""Runs of every method on several ranks, and the same on one (see distributed_programs.py)."""

import contextlib
import json
import os
import shlex
from unittest import mock

from tiny_runs import results

import ntkmarglik.programs.classify.run
from ntkmarglik.programs.classify.config import parse

# 47 = 23 + 23 + 1: uneven parts, one of them empty; three blocks on two ranks are two and one
TINY = shlex.split(
    "--model mlp --width 6 --n-data 47 --subset 16 --outputs 2 --epochs 2 --burnin 1 --frequency "
    "1 --prior-steps 2 --aug-steps 1 --aug-samples 2 --batch-size 23 --precision float64 "
    "--samples 2 --solver-passes 4 --ladder 2 --blocks-per-step 3 --lr 1e-3 --no-baseline"
)
RUNS = {
    "map": "--method map",
    "ntk": "--method ntk --augment affine --flip --baseline",
    "ntk-large": "--method ntk --augment affine --shard-blocks --partition class",
    "ntk-fisher": "--method ntk --root fisher --columns iid --prior diagonal",
    "conditioned": "--method ntk-conditioned --steps-per-block 2 --outputs 1 --baseline",
    "conditioned-all": "--method full --inducing 0.5 --augment affine --shard-blocks --outputs 1",
    "conditioned-layers": "--method blockdiag --inducing 0.3 --outputs 1 --root fisher",
    "ntk-all": "--method ntk --subset 0 --augment affine",
    "full": "--method full --subset 0 --outputs 0",
    "blockdiag": "--method blockdiag --prior scalar",
    "kfac": "--method kfac --subset 0 --outputs 0 --augment affine",
    "kfac-blocks": "--method kfac --subset 0 --augment affine --aug-block 16 --kfac reduce",
    "diag": "--method diag --shard-blocks --augment affine",
    "augerino": "--method augerino --augment affine",
    "elbo": "--method elbo --augment affine --antithetic",
    "de-elbo": "--method de-elbo --posterior group",
    "sampled": "--method sampled --baseline",
    "sampled-sgd": "--method sampled --solver sgd --solver-steps 8 --g-prior",
}


def run(name, folder):
    drawing = mock.patch("ntkmarglik.programs.classify.pictures.draw")
    with drawing, mock.patch("ntkmarglik.runs.report.show"):
        ntkmarglik.programs.classify.run.run(
            parse([*TINY, *shlex.split(RUNS[name]), "--out", str(folder / name)])
        )


def differences(found, expected, where=""):
    """Where two results differ by more than rounding."""
    if isinstance(expected, dict | list):
        keys = expected if isinstance(expected, dict) else range(len(expected))
        if len(found) != len(expected):
            return [f"{where}: {len(found)} instead of {len(expected)} entries"]
        return [
            d
            for key in keys
            if key != "ranks"
            for d in differences(found[key], expected[key], f"{where}.{key}")
        ]
    if isinstance(expected, float) and isinstance(found, float):
        return (
            []
            if abs(found - expected) <= 1e-6 * max(1e-3, abs(expected))
            else [f"{where}: {found} not {expected}"]
        )
    return [] if found == expected else [f"{where}: {found} not {expected}"]


def alone(names, folder):
    """Runs in one process each, shared out among processes that do not know of each other."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with mock.patch(
        "ntkmarglik.programs.classify.run.meeting", return_value=contextlib.nullcontext(None)
    ):
        with mock.patch("ntkmarglik.programs.classify.run.rank", return_value=0):
            for name in names[rank::size]:
                run(name, folder)


def compare(ranks, name, folder):
    """The same run on all ranks."""
    with mock.patch(
        "ntkmarglik.programs.classify.run.meeting", return_value=contextlib.nullcontext(ranks)
    ):
        run(name, folder / "several")
    ranks.barrier("reading both runs")
    found = differences(
        *(json.loads(json.dumps(results(folder / kind / name))) for kind in ("several", "one"))
    )
    assert not found, "\n".join([name, *found])
    assert (
        json.loads((folder / "several" / name / "summary.json").read_text())["ranks"] == ranks.size
    )
