"""The command generators of scripts/, imported and printed."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def script(name):
    """A module of scripts/, as its neighbours import it."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    return importlib.import_module(name)


def printed(generator, capsys, monkeypatch, *flags):
    name = f"generate_{generator}_commands"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    module = script(name)
    script("commands").print_commands(None, module.experiments, getattr(module, "VARIANTS", None))
    return capsys.readouterr().out.splitlines()
