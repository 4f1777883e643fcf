"""Fine-tune small networks by several methods; prints accuracy and time as csv and a table.

python scripts/make_small_checkpoints.py convnext bert && python scripts/compare_finetuning.py

The same command again continues a stopped comparison. All runs are made by one process, one after
the other, so that their times compare; --print shows their commands in place of running them,
--finished tabulates what is there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import target_file
from ntkmarglik.programs.finetune import rows
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.finetune.run import run
from ntkmarglik.runs import records
from ntkmarglik.runs.folder import read_summary

METHODS = ("de-elbo", "elbo", "la-lml", "la-clml", "map-gs", "map-bo")
PROBLEMS: dict[str, dict[str, Any]] = {
    "cifar10": {
        "checkpoint": "convnext-cifar10-01234",
        "dataset": "cifar10",
        "classes": (5, 6, 7, 8, 9),
    },
    "ag_news": {
        "checkpoint": "bert-ag_news-02",
        "dataset": "ag_news",
        "classes": (1, 3),
        "steps": 200,
    },
}
SIZES = {"cifar10": (100, 1000), "ag_news": (100, 400)}
SMALL: dict[str, Any] = {
    "steps": 100,
    "batch_size": 50,
    "n_test": 1000,
    "eval_every": 100,
    "rates": (0.1, 0.01),
    "backbone_decays": (1e-2, 1e-4),
    "head_decays": (1e-3,),
    "trials": 8,  # five are drawn at random before any is proposed
    "laplace_every": 25,
    "laplace_steps": 30,
    "draws": 5,
    "threads": 1,
    "device": "cpu",
}


def configs(given: argparse.Namespace) -> list[FinetuneConfig]:
    """The runs, seed by seed, so that a stopped comparison has something of everything."""
    found = []
    for seed in range(given.seeds):
        for problem in given.problems:
            for n_data in SIZES[problem]:
                for method in given.methods:
                    settings = {
                        **SMALL,
                        **PROBLEMS[problem],
                        "n_data": n_data,
                        "method": method,
                        "seed": seed,
                    }
                    settings["checkpoint"] = str(given.checkpoints / settings["checkpoint"])
                    name = f"{problem}-{n_data}-{method}-seed{seed}"
                    found.append(
                        FinetuneConfig().updated(
                            **settings,
                            data_root=given.data_root,
                            out=given.runs / name,
                            resume=True,
                        )
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", choices=tuple(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="as of finetune.py")
    parser.add_argument("--seeds", type=int, default=3, help="training sets of each size")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="where data files are")
    parser.add_argument(
        "--checkpoints", type=Path, default=Path("checkpoints"), help="of make_small_checkpoints.py"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/finetune"), help="folder for the run folders"
    )
    parser.add_argument("--csv", type=target_file, help="write one row per run here")
    parser.add_argument("--print", action="store_true", help="print the commands")
    parser.add_argument(
        "--finished", action="store_true", help="run nothing; tabulate the runs that are finished"
    )
    given = parser.parse_args()
    chosen = configs(given)
    if given.print:
        print("\n".join(config.command() for config in chosen))
        return
    if not given.finished:
        for config in chosen:
            run(config)
    folders = [Path(str(config.run.out)) for config in chosen]
    done = [folder for folder in folders if read_summary(folder) is not None]
    if len(done) < len(folders):
        print(
            f"{len(folders) - len(done)} of {len(folders)} runs are not finished", file=sys.stderr
        )
    found = [rows.run_row(folder) for folder in done]
    if given.csv:
        records.write(given.csv, rows.COLUMNS, found)
    print(rows.table(found))


if __name__ == "__main__":
    sys.exit(exit_code(main))
