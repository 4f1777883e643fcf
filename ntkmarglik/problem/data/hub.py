"""Download from the Hugging Face hub: checked by sizes and hashes, and moved in place at once."""

import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.data.sources import Source


def download(source: Source, split: str, folder: Path) -> list[Path]:
    """Fetch the Parquet files of a split into `folder`: all of them arrive sound, or none."""
    try:
        return _fetch_split(source.repository, source.splits[split], folder)
    except NtkMarglikError:
        raise
    except Exception as error:
        # the hub raises errors of four libraries; all mean the same to the user
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NtkMarglikError(
            f"The {split} split of {source.repository.split('/')[1]} is not in {folder} and can't "
            f"be downloaded ({reason}). {source.how_to_get(folder)}"
        ) from error


def _fetch_split(repository: str, split: str, folder: Path) -> list[Path]:
    """Fetch the files of a split, by its name on the hub, to a place beside, then move them all."""
    import huggingface_hub

    info = huggingface_hub.HfApi().dataset_info(repository, files_metadata=True, timeout=20)
    pattern = re.compile(rf"(^|/){re.escape(split)}[-.][^/]*parquet$")
    remote = [sibling for sibling in info.siblings or [] if pattern.search(sibling.rfilename)]
    remote.sort(key=lambda sibling: sibling.rfilename)
    if not remote:
        raise FileNotFoundError(f"{repository} has no Parquet file of split {split!r}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        # The commit is pinned: the hashes above must belong to the bytes below.
        fetched = [_fetch(repository, file, info.sha, temporary) for file in remote]
        targets = [folder / Path(file.rfilename).name for file in remote]
        if len(remote) == 1:
            targets = [folder / f"{split}.parquet"]
        for path, target in zip(fetched, targets, strict=True):
            os.replace(path, target)
    return targets


def _fetch(repository: str, file: Any, revision: str | None, folder: str) -> Path:
    """One file of a repository, checked against what the hub states about it."""
    import huggingface_hub

    name = file.rfilename
    path = huggingface_hub.hf_hub_download(
        repository, name, repo_type="dataset", revision=revision, local_dir=folder
    )
    sha256 = None if file.lfs is None else file.lfs["sha256"]
    _check(Path(path), name, file.size, sha256)
    return Path(path)


def _check(path: Path, name: str, size: int | None, sha256: str | None) -> None:
    n_bytes = path.stat().st_size
    if size is not None and n_bytes != size:
        raise NtkMarglikError(
            f"Download of {name} has {n_bytes} bytes, but the hub states {size}. Try again."
        )
    if sha256 is not None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            raise NtkMarglikError(
                f"Download of {name} has sha256 {digest}, but the hub states {sha256}. Try again."
            )
