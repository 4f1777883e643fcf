"""The command `ntk-marglik`: its list of programs, handed arguments, mistakes, and its start."""

import subprocess
import sys

import pytest
import tomllib
from programs import ROOT

from ntkmarglik.programs import main as front


def ended(*command):
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_help_lists_what_is_installed_and_imports_nothing_heavy():
    done = ended("-X", "importtime", "-m", "ntkmarglik", "--help")
    assert done.returncode == 0
    for command in front.COMMANDS:
        assert (f"  {command.name} " in done.stdout) is command.there()
    loaded = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
    }
    assert not loaded & {"torch", "numpy", "tyro", "matplotlib", "asdl_marglik"}


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_no_command_shows_the_list(arguments, capsys):
    assert front.main(arguments) == 0
    assert capsys.readouterr().out.startswith("usage: ntk-marglik COMMAND")


@pytest.mark.parametrize(
    "name, words", [("rnu", "Did you mean 'run'?"), ("--epochs", "Known are run, grid")]
)
def test_an_unknown_command_names_a_close_one(name, words, capsys):
    assert front.main([name]) == 2
    assert words in capsys.readouterr().err


def test_a_command_gets_the_arguments_and_its_code_is_returned(monkeypatch, capsys):
    def program(arguments):
        print(sys.argv[0], arguments)
        return 75

    monkeypatch.setattr(sys, "argv", ["ntk-marglik", "run", "--epochs", "2"])
    monkeypatch.setattr("ntkmarglik.programs.classify.command.main", program)
    assert front.main() == 75
    assert capsys.readouterr().out == "ntk-marglik run ['--epochs', '2']\n"


def test_commands_are_functions_of_arguments(monkeypatch, capsys):
    assert len({command.name for command in front.COMMANDS}) == len(front.COMMANDS)
    monkeypatch.setattr(sys, "argv", ["ntk-marglik"])
    for command in front.COMMANDS:
        if command.there():
            with pytest.raises(SystemExit) as end:
                command(["--help"])
            assert not end.value.code and "usage: " in capsys.readouterr().out


def test_a_module_that_is_not_there_is_left_out(monkeypatch, capsys):
    missing = front.Command("report", "ntkmarglik.absent.run:main", "nothing")
    monkeypatch.setattr(front, "COMMANDS", (*front.COMMANDS[:1], missing))
    assert "report" not in front.usage()
    assert front.main(["report"]) == 2 and "Known are run." in capsys.readouterr().err


def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch, capsys):
    def program(arguments):
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr(sys, "argv", ["ntk-marglik"])
    monkeypatch.setattr("ntkmarglik.programs.grid.command.main", program)
    assert front.main(["grid"]) == 2
    assert "needs yaml: pip install 'ntk-marglik[runner]'" in capsys.readouterr().err


def test_the_wheel_installs_the_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"ntk-marglik": f"{front.__name__}:main"}
