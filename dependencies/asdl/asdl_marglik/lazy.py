"""What is imported when it is first used.

Torch takes a second to import. A program that only needs the names of what there is, to read its
command line or to complete it in a shell, does not wait for it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Later:
    """A function of a module that is imported when the function is first called.

    Args:
        target: "module:function".
    """

    target: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        module, _, function = self.target.partition(":")
        return getattr(importlib.import_module(module), function)(*arguments, **options)


def public_names(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names are imported on first use.

    Which names there are, and where they come from, says the stub of the package alone, which type
    checkers and editors read too: lines `from module import name` in `__init__.pyi` (as in SPEC 1
    of scientific Python).

    Args:
        package: by name; it is being imported.
    """
    module = sys.modules[package]
    homes = _homes(Path(str(module.__file__)).with_suffix(".pyi"))

    def find(name: str) -> Any:
        if name in homes:
            found = getattr(importlib.import_module(homes[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            found = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(module, name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(module), *homes})

    return find, names, sorted(homes)


def _homes(stub: Path) -> dict[str, str]:
    """The module of every name that a stub imports."""
    statements = ast.parse(stub.read_text(encoding="utf-8")).body
    imports = [node for node in statements if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in imports for name in node.names}
