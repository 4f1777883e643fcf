"""Pages of tutorials show the programs of today, and what these printed."""

import importlib.util
import re

import pytest
from programs import ROOT

spec = importlib.util.spec_from_file_location("make_tutorials", ROOT / "docs/make_tutorials.py")
make_tutorials = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_tutorials)

PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
REPAIR = "run `python docs/make_tutorials.py`"


def test_every_program_has_a_page():
    pages = {page.stem for page in make_tutorials.TUTORIALS.glob("*.md")} - {"index"}
    assert pages == {program.stem for program in PROGRAMS}
    menu = (ROOT / "mkdocs.yml").read_text()
    assert all(f"tutorials/{page}.md" in menu for page in pages)


@pytest.mark.parametrize("page", make_tutorials.PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_code_and_the_output_of_today(page):
    text = page.read_text()
    assert make_tutorials.filled(text) == text, REPAIR
    assert "<!-- code: " in text or page.stem == "index"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_the_output_is_of_this_program(program):
    digest, text = make_tutorials.output_of(program.stem)
    assert digest == make_tutorials.digest(program), f"{REPAIR} {program.stem}"
    assert "nan" not in re.findall(r"\w+", text)
    picture = make_tutorials.TUTORIALS / f"pictures/{program.stem}.png"
    page = (make_tutorials.TUTORIALS / f"{program.stem}.md").read_text()
    assert picture.stat().st_size > 5_000 and f"pictures/{picture.name}" in page


def test_code_that_is_not_there_is_an_error():
    program = "examples/own_loop.py"
    for place in (["no_such_function"], ["prior =", "no such line"], ["no such line", "prior ="]):
        with pytest.raises(SystemExit, match="has no"):
            make_tutorials.code_of(program, *place)
    assert make_tutorials.code_of(program, "prior =", "prior =").startswith("prior = GaussianPrior")
