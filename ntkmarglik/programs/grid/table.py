"""The csv of a grid: one row per bound and value, and at its top the commands that made it."""

from __future__ import annotations

import csv
import io
import math
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from laplace_marglik import Evidence
from ntkmarglik.errors import NtkMarglikError, PassingProblem
from ntkmarglik.programs.grid.bound import Bound
from ntkmarglik.programs.grid.config import GridConfig, parse
from ntkmarglik.runs import checkpoint
from ntkmarglik.settings import refusing

BOUND = tuple(f.name for f in fields(Bound))
COLUMNS = (
    "hyperparameter",
    "value",
    *BOUND,
    "status",
    "n_data",
    "n_blocks",
    "blocks_used",
    "log_marglik",
    "standard_error",
    "log_likelihood",
    "scatter",
    "log_det_ratio",
)
IDENTITY = ("hyperparameter", "value", *BOUND)
NUMBERS = (
    *("value", "n_data", "n_blocks", "blocks_used"),
    *("log_marglik", "log_likelihood", "scatter", "log_det_ratio"),
)
ROUNDING = 1e-5  # float32 evidences are sums of float32 parts; a wrong digit is mostly more
NETWORK, BOUNDS = "# network: ", "# bounds: "
Row = dict[str, str]


@dataclass
class Table:
    """A csv file that is whole at any moment: every addition replaces it."""

    path: Path
    commands: list[str]
    rows: list[Row]
    damaged: int = 0  # lines that are left out: cut off, doubled, or not what a bound can be

    @classmethod
    def open(cls, path: Path, network: str, config: GridConfig) -> Table:
        """The rows that are there already, if they are of the same network and settings; else an
        error.
        """
        bounds = BOUNDS + portable(config).command()
        if not path.exists():
            return cls(path, [NETWORK + network, bounds], [])
        commands, rows, damaged = read_whole(path)
        other = (
            f"{path} holds other results; choose another folder with --out, or delete that file "
            "to replace them."
        )
        if not commands or commands[0] != NETWORK + network:
            raise NtkMarglikError(
                f"{other} Their network: {commands[0] if commands else 'not named'}"
            )
        for command in commands[1:]:
            stored = _settings_of(command, path).flat()
            for name, value in config.flat().items():
                if name not in config.free() and stored[name] != value:
                    raise NtkMarglikError(
                        f"{other} There --{name.replace('_', '-')} is {stored[name]}, here {value}."
                    )
        if bounds not in commands:
            commands.append(bounds)
        return cls(path, commands, rows, damaged)

    def tell_damage(self) -> None:
        """Say that lines are evaluated again because they cannot be trusted."""
        if self.damaged:
            print(
                f"warning: {self.path} has {self.damaged} damaged or doubled lines; what they "
                "were of is evaluated again",
                file=sys.stderr,
            )

    def missing(self, bound: Bound, values: Iterable[float]) -> list[float]:
        """Values of the grid at which a bound has not been evaluated."""
        cells = {name: str(value) for name, value in asdict(bound).items()}
        rows = [row for row in self.rows if all(row[name] == cells[name] for name in BOUND)]
        present = {row["value"] for row in rows}
        return [value for value in values if written(value) not in present]

    def add(self, rows: list[Row]) -> None:
        """Add rows; whatever happens, the file has all of them or none."""
        self.rows.extend(rows)
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        content = "".join(f"{command}\n" for command in self.commands) + text.getvalue()
        try:
            checkpoint.replace(self.path, content.encode())
        except OSError as error:
            raise PassingProblem(
                f"{self.path} cannot be written ({error.strerror}); make room or choose another "
                "folder with --out. The same command continues from what is there."
            ) from error


def _settings_of(command: str, path: Path) -> GridConfig:
    """The settings of a command at the top of a file."""
    try:
        return refusing(parse, shlex.split(command.removeprefix(BOUNDS))[2:])
    except (NtkMarglikError, ValueError) as error:
        raise NtkMarglikError(
            f"{path} is damaged: `{command[:80]}` at its top is no command of bound_grid.py "
            f"({error}). Delete it to evaluate its bounds again."
        ) from error


def row(
    hyperparameter: str, value: float, bound: Bound, evidence: Evidence, n_data: int, used: int
) -> Row:
    """One line of the file; evidences are of all data, in nats."""
    error = evidence.standard_error
    return {
        "hyperparameter": hyperparameter,
        "value": written(value),
        **{name: str(setting) for name, setting in asdict(bound).items()},
        "status": evidence.status,
        "n_data": str(n_data),
        "n_blocks": f"{evidence.n_blocks:g}",
        "blocks_used": str(used),
        "log_marglik": written(evidence.total.item()),
        "standard_error": "" if error is None else written(error),
        "log_likelihood": written(evidence.log_likelihood.item()),
        "scatter": written(evidence.scatter.item()),
        "log_det_ratio": written(evidence.log_det_ratio.item()),
    }


def read(path: Path) -> tuple[list[str], list[Row]]:
    """The commands and the rows of a file; damaged and doubled rows are left out."""
    commands, rows, _ = read_whole(path)
    return commands, rows


def read_whole(path: Path) -> tuple[list[str], list[Row], int]:
    """The commands and the rows of a file, and how many of its rows cannot be trusted."""
    try:
        lines = path.read_bytes().decode().splitlines()
    except OSError as error:
        raise NtkMarglikError(
            f"{path} cannot be read ({error.strerror}); bound_grid.py makes such files."
        ) from error
    except UnicodeDecodeError as error:
        raise NtkMarglikError(
            f"{path} is damaged: it is not text in UTF-8 ({error.reason}). Delete it to evaluate "
            "its bounds again."
        ) from error
    commands = [line for line in lines if line.startswith("#")]
    try:
        table = csv.DictReader(line for line in lines if not line.startswith("#"))
        columns = tuple(table.fieldnames or ())
        read_rows = list(table)
    except csv.Error as error:
        raise NtkMarglikError(f"{path} is not a csv file ({error}).") from error
    if columns != COLUMNS:
        raise NtkMarglikError(f"{path} is not a file of bound_grid.py: its columns are {columns}.")
    rows: dict[tuple[str, ...], Row] = {}
    for line in read_rows:
        if _is_sound(line):
            rows.setdefault(tuple(line[name] for name in IDENTITY), line)
    return commands, list(rows.values()), len(read_rows) - len(rows)


def _is_sound(line: dict) -> bool:
    """Whether a row is whole, and its evidence the sum of its parts:

    log q = log-likelihood - scatter / 2 - log-det ratio / 2, to the digits that are written.
    """
    if any(not isinstance(line.get(name), str) for name in COLUMNS) or None in line:
        return False
    try:
        numbers = [float(line[name]) for name in NUMBERS]
        if line["standard_error"]:
            numbers.append(float(line["standard_error"]))
    except ValueError:
        return False
    _, _, _, _, total, fit, scatter, log_det = numbers[: len(NUMBERS)]
    size = sum(map(abs, (total, fit, scatter, log_det)))
    parts = fit - 0.5 * scatter - 0.5 * log_det
    finite = all(map(math.isfinite, numbers))
    return finite and abs(total - parts) <= ROUNDING * max(1.0, size)


def written(value: float) -> str:
    """A number as it stands in the file."""
    return f"{value:.10g}"


def portable(config: GridConfig) -> GridConfig:
    """The settings without those of this machine."""
    checkpoint_path = config.reference.checkpoint
    defaults = GridConfig()
    return config.updated(
        data_root=defaults.problem.data_root,
        out=None,
        memory_budget=0.0,
        threads=1,
        dry_run=False,
        checkpoint=None if checkpoint_path is None else Path(checkpoint_path.name),
    )
