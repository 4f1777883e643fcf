"""Methods by name: those that are registered, and one for every structure of the curvature."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from asdl_marglik import STRUCTURES
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.methods.base import Method
from ntkmarglik.learn.methods.laplace import laplace_with


class Methods(Mapping[str, type[Method]]):
    """What `--method` offers; a structure that is registered later is in it at once."""

    def __init__(self) -> None:
        self._own: dict[str, type[Method]] = {}

    def __getitem__(self, name: str) -> type[Method]:
        if name in self._own:
            return self._own[name]
        return laplace_with(STRUCTURES[name])

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from STRUCTURES

    def __len__(self) -> int:
        return len(self._own) + len(STRUCTURES)

    def named(self, name: str) -> type[Method]:
        """The method of this name, or an error that lists them."""
        if name in self:
            return self[name]
        close = difflib.get_close_matches(name, self, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise NtkMarglikError(f"Unknown method {name!r}. {hint}Known are {', '.join(self)}.")

    def add(self, method: type[Method]) -> None:
        if not method.name or method.name in self:
            raise NtkMarglikError(
                f"{method.__name__} needs a `name` of its own, but {method.name!r} is "
                f"{'taken' if method.name else 'empty'}."
            )
        self._own[method.name] = method

    def remove(self, name: str) -> None:
        """Forget a method that was registered."""
        del self._own[name]


METHODS = Methods()


def register_method(method: type[Method]) -> type[Method]:
    """Make a method known by its name to the command line, the programs and the figures."""
    METHODS.add(method)
    return method
