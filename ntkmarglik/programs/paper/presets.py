"""Settings of the paper's experiments by name: `--preset paper-cifar`, `--preset list`.

Presets are the files in configs/: NAME.yaml is paper-NAME, and with configs/small/NAME.yaml upon it
paper-NAME-small. A file without a data set changes another, whose name its own begins with.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.settings import read_yaml

CONFIGS = Path(__file__).parent / "configs"
# experiments whose names do not say their data
OTHER_NAMES = {"bound-prior": "mnist", "bound-lila": "mnist-rotated"}


def presets(known: Collection[str]) -> dict[str, list[Path]]:
    """The files of each preset, later ones override; those with settings not known are left out."""
    files = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}
    found: dict[str, list[Path]] = {}
    for stem, path in files.items():
        below = [name for name in files if stem.startswith(f"{name}-")]
        whole = "dataset" in read_yaml(path)
        if not whole and not below:
            continue
        parts = [path] if whole else [files[max(below, key=len)], path]
        if not all(set(read_yaml(part)) <= set(known) for part in parts):
            continue
        smaller = [CONFIGS / "small" / part.name for part in parts]
        for name in filter(None, (OTHER_NAMES.get(stem), stem)):
            found[f"paper-{name}"] = parts
            if smaller[-1].exists():
                pairs = zip(parts, smaller, strict=True)
                found[f"paper-{name}-small"] = [f for pair in pairs for f in pair if f.exists()]
    return found


def expanded(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Arguments with `--config FILE` for the files of each `--preset NAME`.

    known: settings of the program. `--preset list` prints the names and ends the program.
    """
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, _, name = word.partition("=")
        if flag != "--preset":
            rest.append(word)
            continue
        for path in _files(name or next(words, ""), known):
            rest += ["--config", str(path)]
    return rest


def _files(name: str, known: Collection[str]) -> list[Path]:
    named = presets(known)
    if name == "list":
        print("\n".join(f"{preset:32} {_about(files)}" for preset, files in named.items()))
        raise SystemExit(0)
    if name not in named:
        close = difflib.get_close_matches(name[:60], named, n=3, cutoff=0.4)
        hint = f"Did you mean {', '.join(close)}? " if close else ""
        raise NtkMarglikError(f"No preset is named {name[:60]!r}. {hint}--preset list has all.")
    return named[name]


def _about(files: Sequence[Path]) -> str:
    """The first sentence of the comment at the head of the last file."""
    return files[-1].read_text().partition("\n")[0].removeprefix("# ").partition(". ")[0]
