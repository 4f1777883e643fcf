"""Hooks of mkdocs: pages show the pictures and the claims page of illustrations/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
CLAIMS = "illustrations/README.md"


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures, and the page of the paper's claims."""
    for picture in sorted((ROOT / "illustrations").glob("*.png")):
        files.append(
            File.generated(config, f"illustrations/{picture.name}", abs_src_path=str(picture))
        )
    files.append(File.generated(config, CLAIMS, abs_src_path=str(ROOT / CLAIMS)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/ in the repository stay within the site."""
    if page.file.src_uri == CLAIMS:
        return markdown.replace("](../ntkmarglik/", "](#ntkmarglik/").replace("](data", "](#data")
    return markdown.replace("](../illustrations/", "](illustrations/")
