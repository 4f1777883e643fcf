"""The lines of a command file: read by the real parsers, and all mistakes told at once."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.methods import METHODS
from ntkmarglik.programs.classify.config import Config
from ntkmarglik.programs.classify.config import parse as parse_run
from ntkmarglik.programs.classify.preflight import check_settings
from ntkmarglik.programs.finetune.config import FinetuneConfig
from ntkmarglik.programs.finetune.config import parse as parse_finetuning
from ntkmarglik.programs.finetune.plan import PLANS
from ntkmarglik.programs.finetune.run import check as check_finetuning
from ntkmarglik.programs.finetune.run import folder_of as folder_of_finetuning
from ntkmarglik.programs.grid.config import CSV, GridConfig
from ntkmarglik.programs.grid.config import parse as parse_grid
from ntkmarglik.programs.grid.run import check as check_grid
from ntkmarglik.programs.grid.run import is_complete
from ntkmarglik.programs.grid.table import read as read_grid
from ntkmarglik.programs.launch import processes
from ntkmarglik.programs.launch.job import Job
from ntkmarglik.runs.folder import CONFIG, folder_of, read_config, read_summary
from ntkmarglik.runs.loggers import Metrics
from ntkmarglik.runs.metrics import read_metrics
from ntkmarglik.settings import refusing


@dataclass(frozen=True)
class RunLine:
    """A run of classification_image.py; its folder is its own."""

    number: int  # of the line in its file
    config: Config  # with its folder, and told to resume
    processes: tuple[str, ...] | None = None  # options of torchrun, if that starts it

    @property
    def folder(self) -> Path:
        return folder_of(self.config)

    @property
    def command(self) -> str:
        if self.processes is None:
            return self.config.command()
        return shlex.join(["torchrun", *self._words])

    @property
    def _words(self) -> tuple[str, ...]:
        """What torchrun is given."""
        return (*(self.processes or ()), Config.script, *self.config.arguments())

    def job(self) -> Job:
        """What to submit."""
        if self.processes is None:
            return Job(
                "ntkmarglik.programs.classify.command:main",
                tuple(self.config.arguments()),
                self.folder,
                Path.cwd(),
            )
        return Job(
            "ntkmarglik.programs.launch.processes:main", self._words, self.folder, Path.cwd()
        )

    def finished(self) -> bool:
        """Whether its summary is there, and that of its baseline if it has one."""
        learns = METHODS.named(self.config.estimator.method).learns()
        folders = [
            self.folder,
            *([self.folder / "baseline"] if self.config.run.baseline and learns else []),
        ]
        return all(read_summary(folder) is not None for folder in folders)

    def progress(self) -> str:
        """Its epoch and latest numbers."""
        baseline = self.folder / "baseline"
        return latest(baseline if baseline.exists() else self.folder, self.config.training.epochs)

    def check(self) -> None:
        """Refuse what cannot run, or would be put in the folder of something else."""
        if self.config.run.dry_run:
            raise NtkMarglikError("--dry-run makes no run; leave it out.")
        # a job may have a GPU where this machine has none
        check_settings(self.config.updated(device="cpu"))
        if (self.folder / CONFIG).exists():
            self.config.refuse_other(read_config(self.folder))


@dataclass(frozen=True)
class GridLine:
    """A part of a bound grid; parts of one grid share a folder and take turns."""

    number: int
    config: GridConfig

    @property
    def folder(self) -> Path:
        return self.config.folder

    @property
    def command(self) -> str:
        return self.config.command()

    def job(self) -> Job:
        """What to submit."""
        return Job(
            "ntkmarglik.programs.grid.command:main",
            tuple(self.config.arguments()),
            self.folder,
            Path.cwd(),
        )

    def finished(self) -> bool | None:
        """Whether its csv has all that the line asks for; None if only the program can tell."""
        return is_complete(self.config)

    def progress(self) -> str:
        """Rows of its csv; before there are any, the training of its network."""
        path = self.folder / CSV
        if path.exists():
            return f"{len(read_grid(path)[1])} rows"
        return latest(self.folder / "reference", self.config.training.epochs)

    def check(self) -> None:
        """Refuse what cannot run, or would be put among other results."""
        if self.config.place.dry_run:
            raise NtkMarglikError("--dry-run makes no grid; leave it out.")
        check_grid(self.config.updated(device="cpu"))
        self.finished()


@dataclass(frozen=True)
class FinetuneLine:
    """A run of finetune.py; its folder is its own."""

    number: int
    config: FinetuneConfig  # with its folder, and told to resume

    @property
    def folder(self) -> Path:
        return folder_of_finetuning(self.config)

    @property
    def command(self) -> str:
        return self.config.command()

    def job(self) -> Job:
        """What to submit."""
        return Job(
            "ntkmarglik.programs.finetune.command:main",
            tuple(self.config.arguments()),
            self.folder,
            Path.cwd(),
        )

    def finished(self) -> bool:
        """Whether its summary is there."""
        return read_summary(self.folder) is not None

    def progress(self) -> str:
        """Its fit, the step in it, and the latest numbers."""
        recorded = read_metrics(self.folder, quiet=True)
        if not recorded:
            return "starting"
        last = recorded[-1]
        search = self.config.search
        place = (
            f"fit {last['fit'] + 1}/{PLANS[search.method].n_fits(search)}",
            f"step {last['fit_step']}/{self.config.training.steps}",
        )
        return ", ".join([*place, *_numbers(last)])

    def check(self) -> None:
        """Refuse what cannot run, or would be put in the folder of something else."""
        if self.config.run.dry_run:
            raise NtkMarglikError("--dry-run makes no run; leave it out.")
        check_finetuning(self.config.updated(device="cpu"))
        if (self.folder / CONFIG).exists():
            self.config.refuse_other(read_config(self.folder))


Line = RunLine | GridLine | FinetuneLine
STARTS = (
    ("python", Config),
    ("torchrun ...", Config),
    ("python", GridConfig),
    ("python", FinetuneConfig),
)


def latest(folder: Path, epochs: int) -> str:
    """The last epoch in a run folder, and each metric as it was last measured."""
    recorded = read_metrics(folder, quiet=True)
    if not recorded:
        return "starting"
    known = {name: value for metrics in recorded for name, value in metrics.items()}
    return ", ".join([f"epoch {known['epoch']}/{epochs}", *_numbers(known)])


def _numbers(metrics: Metrics) -> list[str]:
    """Those numbers that are worth a look while a run goes on."""
    shown = [f"loss {metrics['loss']:.4f}"]
    if "log_marglik" in metrics:
        shown.append(f"evidence {metrics['log_marglik']:.4f}")
    if "test_accuracy" in metrics:
        shown.append(f"test acc. {100 * metrics['test_accuracy']:.1f} %")
    return shown


def read_lines(path: Path) -> list[Line]:
    """The commands of a file; one error for all lines that cannot be run."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise NtkMarglikError(f"The command file {path} cannot be read: {error}.") from error
    by_folder: dict[Path, list[Line]] = {}
    mistakes = []
    for number, written in enumerate(text.splitlines(), start=1):
        try:
            words = shlex.split(written, comments=True)
            if words:
                line = _line(number, words)
                line.check()
                _refuse_shared_folder(line, by_folder)
                by_folder.setdefault(line.folder, []).append(line)
        except (NtkMarglikError, ValueError, OSError) as error:
            mistakes.append(f"{path}:{number}: {error}")
    if mistakes:
        raise NtkMarglikError(
            "\n".join([f"{len(mistakes)} of the lines cannot be run:", *mistakes])
        )
    if not by_folder:
        raise NtkMarglikError(
            f"{path} has no commands; scripts/generate_*_commands.py print such files."
        )
    return sorted(
        (line for lines in by_folder.values() for line in lines), key=lambda line: line.number
    )


def _line(number: int, words: list[str]) -> Line:
    program, arguments = words[:2], words[2:]
    if words[0] == "torchrun" and Config.script in words:
        split = words.index(Config.script)
        config = refusing(parse_run, words[split + 1 :]).updated(resume=True)
        return RunLine(
            number, config.updated(out=folder_of(config)), processes.checked(words[1:split])
        )
    if program == ["python", Config.script]:
        config = refusing(parse_run, arguments).updated(resume=True)
        return RunLine(number, config.updated(out=folder_of(config)))
    if program == ["python", GridConfig.script]:
        return GridLine(number, refusing(parse_grid, arguments))
    if program == ["python", FinetuneConfig.script]:
        tuning = refusing(parse_finetuning, arguments).updated(resume=True)
        return FinetuneLine(number, tuning.updated(out=folder_of_finetuning(tuning)))
    known = " or ".join(f"`{how} {kind.script} ...`" for how, kind in STARTS)
    raise NtkMarglikError(f"a line is {known}, but this is `{shlex.join(words)}`.")


def _refuse_shared_folder(line: Line, others: dict[Path, list[Line]]) -> None:
    """Only parts of one grid share a folder; each part is there once."""
    for other in others.get(line.folder, []):
        if other.command == line.command:
            raise NtkMarglikError(f"it is the same as line {other.number}.")
        if not (isinstance(other, GridLine) and isinstance(line, GridLine)):
            raise NtkMarglikError(
                f"its folder {line.folder} is that of line {other.number}; give it another --out."
            )
