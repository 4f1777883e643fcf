"""Hooks of mkdocs: files beside docs/ belong to the site, and links to them work in both places.

Pages are read in the repository too, so that their links are those of the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# pages and files outside docs/ that the site shows
BESIDE = (
    "illustrations/*.png",
    "illustrations/README.md",
    "examples/*",
    "dependencies/*/README.md",
)
ALONE = ("CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<path>[^()#\s:]+)(?P<anchor>#[^()\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add what the site shows of the rest of the repository, under its path there."""
    for pattern in (*BESIDE, *ALONE):
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                uri = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Links to files of the repository lead to their place in the site, or become plain text."""
    source = page.file.src_uri
    generated = page.file.generated_by is not None
    folder = posixpath.dirname(source if generated else f"docs/{source}")

    def moved(link: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        if not (ROOT / path).exists():
            return link[0]
        uri = path.removeprefix("docs/")
        if files.get_file_from_path(uri) is None:
            return link["text"][1:-1]
        target = posixpath.relpath(uri, posixpath.dirname(source) or ".")
        return f"{link['text']}({target}{link['anchor'] or ''})"

    return LINK.sub(moved, markdown)
