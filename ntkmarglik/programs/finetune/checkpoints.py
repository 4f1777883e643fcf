"""Where a pretrained network is: a folder of this machine, or one commit of a hub's repository."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ntkmarglik.errors import NtkMarglikError, PassingProblem
from ntkmarglik.runs.checkpoint import replace

HUB = "hub:"  # before the name of a repository: what is not said to be there is not asked for there
REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
REVISION = re.compile(r"[\w./-]+")
SUMS = "SHA256SUMS"  # of the files in a folder, as sha256sum writes and checks them


@dataclass(frozen=True)
class Place:
    """What `from_pretrained` is given: a folder, or a repository and its commit."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{HUB}{self.name}@{self.revision}"

    @property
    def folder(self) -> Path | None:
        """The folder, if it is one."""
        return Path(self.name) if self.revision is None else None


def find(checkpoint: str) -> Place:
    """The place of a checkpoint: a folder that is there, or `hub:NAME`, `hub:NAME@REVISION`.

    A name on the hub becomes the commit that it has now, so that network and preprocessing are of
    one state of the repository, and the run can say which.
    """
    check_name(checkpoint)
    if not checkpoint.startswith(HUB):
        _check_sums(Path(checkpoint))
        return Place(checkpoint)
    name, revision = _parts(checkpoint)
    return Place(name, _commit(name, revision or None))


def check_name(checkpoint: str) -> None:
    """Refuse what is no name on the hub, which is not asked, nor a folder of save_pretrained."""
    if not checkpoint.startswith(HUB):
        _check_folder(Path(checkpoint))
        return
    name, revision = _parts(checkpoint)
    if not REPOSITORY.fullmatch(name) or (revision and not REVISION.fullmatch(revision)):
        raise NtkMarglikError(
            f"--checkpoint {checkpoint}: a network on the Hugging Face hub is hub:OWNER/NAME or "
            "hub:OWNER/NAME@REVISION."
        )


def _parts(checkpoint: str) -> tuple[str, str]:
    """Repository and revision of a name on the hub; without one, the revision is empty."""
    name, _, revision = checkpoint.removeprefix(HUB).partition("@")
    return name, revision


def _check_folder(folder: Path) -> None:
    """Refuse what is not a folder of save_pretrained."""
    if not folder.is_dir():
        hint = ""
        if REPOSITORY.fullmatch(str(folder)):
            hint = f" For the network of that name on the Hugging Face hub write {HUB}{folder}."
        raise NtkMarglikError(f"--checkpoint {folder}: there is no such folder.{hint}")
    if not (folder / "config.json").exists():
        raise NtkMarglikError(
            f"--checkpoint {folder}: the folder has no config.json; save_pretrained makes one."
        )


def _check_sums(folder: Path) -> None:
    """Refuse a folder that has been damaged since it was written."""
    for name, digest in _stated_sums(folder):
        if _sum(folder / name) != digest:
            raise NtkMarglikError(
                f"--checkpoint {folder}: {name} is damaged (its sha256 is not that of {SUMS}). "
                "Make or copy the folder again."
            )


def write_sums(folder: Path) -> None:
    """Write down the digests of a folder's files, by which damage is noticed when they are read."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    lines = [f"{_sum(path)}  {path.name}\n" for path in files]
    replace(folder / SUMS, "".join(lines).encode())


def _stated_sums(folder: Path) -> Iterator[tuple[str, str]]:
    """Names and digests of the files in a folder, as far as they were written down."""
    if not (folder / SUMS).exists():
        return
    for line in (folder / SUMS).read_text(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if not re.fullmatch(r"[0-9a-f]{64}", digest) or Path(name).name != name:
            raise NtkMarglikError(f"{folder / SUMS} is damaged: {line[:80]!r}.")
        yield name, digest


def _sum(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return "not there"


def _commit(name: str, revision: str | None) -> str:
    """The commit of a repository at a revision, from the hub or its local copy."""
    import huggingface_hub

    with explained(Place(name, revision or "main"), "configuration"):
        # the file lies in a folder named by the commit, wherever it came from
        path = huggingface_hub.hf_hub_download(name, "config.json", revision=revision)
    return Path(path).parent.name


@contextlib.contextmanager
def explained(place: Place, part: str) -> Iterator[None]:
    """Errors of the libraries, in one sentence that says what to do."""
    try:
        yield
    except (NtkMarglikError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # they raise errors of many libraries; all mean the same to a user
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind: type[NtkMarglikError] = NtkMarglikError
        advice = "Give a folder made by save_pretrained, in the format of safetensors, of"
        if place.folder is None:
            kind = PassingProblem
            advice = "Is there a connection to the hub? Without one, give a folder of"
        raise kind(
            f"The {part} of the checkpoint {place} cannot be loaded ({reason}). {advice} the "
            "network and of its image processor or tokenizer."
        ) from error
