"""The documentation is built without a warning, and no link of it or of the repository is dead."""

import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from programs import ROOT

import asdl_marglik
import laplace_marglik

DOCUMENTS = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "illustrations/*.md",
        "examples/*.md",
        "dependencies/*/*.md",
    )
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^()\s]+)\)|src=\"([^\"]+)\"")
# files of the repository that are named in code spans
FOLDERS = "examples|scripts|benchmarks|docs|dependencies|illustrations|tests|ntkmarglik"
NAMED = re.compile(rf"`(?:python )?((?:{FOLDERS})/[\w./-]+\.(?:py|md|csv|png|yaml))\b")


class Page(HTMLParser):
    """The targets of a page's links, and the places that links may lead to."""

    def __init__(self, text):
        super().__init__()
        self.links, self.places = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.places.update(v for k, v in attrs if k in ("id", "name") and v)
        target = values.get("href") if tag in ("a", "link") else values.get("src")
        if target and not urlsplit(target).scheme and not target.startswith("//"):
            self.links.append(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, by path of each page."""
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("site")
    command = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Page(path.read_text()) for path in folder.rglob("*.html")}


def test_the_site_has_every_page(site):
    names = {path.parent.name for path in site}
    assert {
        "estimators",
        "faq",
        "extending",
        "how_it_works",
        "own_loop",
        "laplace_marglik",
    } <= names
    assert len(site) > 30


def test_no_link_of_the_site_is_dead(site):
    dead = []
    for page, parsed in site.items():
        if page.name == "404.html":  # its links are those of the site's own address
            continue
        for link in parsed.links:
            parts = urlsplit(link)
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            known = site[target].places if target in site else {unquote(parts.fragment)}
            if not target.exists() or unquote(parts.fragment) not in known:
                dead.append((page.parent.name, link))
    assert not dead


@pytest.mark.parametrize("package", [asdl_marglik, laplace_marglik], ids=lambda p: p.__name__)
def test_the_reference_has_every_public_name(package):
    text = (ROOT / f"docs/api/{package.__name__}.md").read_text()
    shown = set(re.findall(r"^::: (\S+)$", text, re.M))
    assert {f"{package.__name__}.{name}" for name in package.__all__} <= shown


# --------------------------------------------------------------------------- in the repository


@cache
def places_in(path):
    """The anchors of a document's headings, as code hosts and mkdocs make them."""
    if path.suffix != ".md":
        return set()
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", prose, re.M)
    plain = [re.sub(r"[^\w\s-]", "", title.lower()) for title in titles]
    return {re.sub(r"[\s]+", "-", title.strip()) for title in plain}


def links_of(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    return [a or b for a, b in LINK.findall(prose)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_link_of_a_document_is_dead(path):
    dead = []
    for link in links_of(path):
        parts = urlsplit(link)
        if parts.scheme:
            continue
        target = (path.parent / parts.path).resolve() if parts.path else path
        if not target.exists() or (parts.fragment and parts.fragment not in places_in(target)):
            dead.append(link)
    dead += [name for name in NAMED.findall(path.read_text()) if not (ROOT / name).exists()]
    assert not dead


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_has_no_marks_of_a_merge(path):
    assert not re.search(r"^(<{7}|>{7}|={7}$)", path.read_text(), re.MULTILINE)


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title, with `code`\n[a](#a-title-with-code) [b](other.md) [c](#nowhere)\n")
    assert links_of(page) == ["#a-title-with-code", "other.md", "#nowhere"]
    assert places_in(page) == {"a-title-with-code"}
    parsed = Page('<h1 id="a">A</h1><a href="b.html#c">b</a><img src="https://x.org/p.png">')
    assert parsed.links == ["b.html#c"] and parsed.places == {"", "a"}
