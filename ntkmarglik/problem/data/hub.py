"""Download from the Hugging Face hub: checked against the hub's own sizes and hashes, and moved in
place at once.
"""

import hashlib
import os
import re
import tempfile
from pathlib import Path

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.data.sources import Source


def download(source: Source, split: str, folder: Path) -> list[Path]:
    """Fetch the Parquet files of a split into `folder`; either all of them arrive sound, or
    none.
    """
    try:
        import huggingface_hub

        info = huggingface_hub.HfApi().dataset_info(
            source.repository, files_metadata=True, timeout=20
        )
        pattern = re.compile(rf"(^|/){re.escape(source.splits[split])}[-.][^/]*parquet$")
        remote = sorted(
            (s for s in info.siblings or [] if pattern.search(s.rfilename)),
            key=lambda s: s.rfilename,
        )
        if not remote:
            raise FileNotFoundError(
                f"{source.repository} has no Parquet file of split {source.splits[split]!r}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
            pairs = []
            for sibling in remote:
                # The commit is pinned: the hashes above must belong to the bytes below.
                fetched = huggingface_hub.hf_hub_download(
                    source.repository,
                    sibling.rfilename,
                    repo_type="dataset",
                    revision=info.sha,
                    local_dir=temporary,
                )
                sha256 = None if sibling.lfs is None else sibling.lfs["sha256"]
                _check(Path(fetched), sibling.rfilename, sibling.size, sha256)
                name = (
                    Path(sibling.rfilename).name
                    if len(remote) > 1
                    else f"{source.splits[split]}.parquet"
                )
                pairs.append((fetched, folder / name))
            for fetched, target in pairs:
                os.replace(fetched, target)
        return [target for _, target in pairs]
    except (
        Exception
    ) as error:  # the hub raises errors of four libraries; all mean the same to the user
        if isinstance(error, NtkMarglikError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NtkMarglikError(
            f"The {split} split of {source.repository.split('/')[1]} is not in {folder} and can't "
            f"be downloaded ({reason}). {source.how_to_get(folder)}"
        ) from error


def _check(path: Path, name: str, size: int | None, sha256: str | None) -> None:
    found = path.stat().st_size
    if size is not None and found != size:
        raise NtkMarglikError(
            f"Download of {name} has {found} bytes, but the hub states {size}. Try again."
        )
    if sha256 is not None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            raise NtkMarglikError(
                f"Download of {name} has sha256 {digest}, but the hub states {sha256}. Try again."
            )
