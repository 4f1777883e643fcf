"""Structures of the curvature by name: which parts cover which weights.

Their names are known without torch; the functions that make their parts are in `cover`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from asdl_marglik.errors import CurvatureError
from asdl_marglik.lazy import Later

if TYPE_CHECKING:
    from asdl_marglik.curvature.problem import Problem
    from asdl_marglik.curvature.term import Term

Guarantee = Literal["exact", "bound", "approximation"]


@dataclass(frozen=True)
class Structure:
    """A named approximation of the curvature: which parts cover which weights.

    Args:
        name: Key in `STRUCTURES`, and what users write (`structure="kfac"`, `--method kfac`).
        parts: Function from a problem to its terms; every weight is in exactly one of them.
        guarantee: What its log-determinant is for all rows at once: "exact"; a "bound", never
            below that of independent blocks of them; or an "approximation", which says nothing.
        additive: Whether its statistics are sums over data, so that the curvature of all data
            takes the memory of a batch.
        label: Name in figures and tables; `name` if empty.
        colour: Colour in figures, as matplotlib reads it.
    """

    name: str
    parts: Callable[[Problem], list[Term]]
    guarantee: Guarantee = "approximation"
    additive: bool = False
    label: str = ""
    colour: str = "#999999"

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.name)


STRUCTURES: dict[str, Structure] = {}


def register_structure(structure: Structure) -> Structure:
    """Make a structure known by its name to everything that offers, draws or checks structures.

    Args:
        structure: The new one; its name must not be taken.
    """
    if structure.name in STRUCTURES:
        raise CurvatureError(f"there is already a structure named {structure.name!r}")
    STRUCTURES[structure.name] = structure
    return structure


COVER = "asdl_marglik.curvature.cover"
# colours that are told apart with any colour vision
register_structure(Structure("ntk", Later(f"{COVER}:ntk"), "exact", label="NTK", colour="#0072B2"))
register_structure(Structure("full", Later(f"{COVER}:full"), "exact", colour="#000000"))
register_structure(
    Structure(
        "blockdiag",
        Later(f"{COVER}:blockdiag"),
        "bound",
        label="block-diagonal",
        colour="#009E73",
    )
)
register_structure(
    Structure("kfac", Later(f"{COVER}:kfac"), additive=True, label="KFAC", colour="#D55E00")
)
register_structure(
    Structure(
        "diag",
        Later(f"{COVER}:diag"),
        "bound",
        additive=True,
        label="diagonal",
        colour="#CC79A7",
    )
)


def parts_of(structure: str, problem: Problem) -> list[Term]:
    """The parts of a named structure; every weight is in exactly one of them.

    Args:
        structure: by name.
        problem: plan, prior, data points and rows.
    """
    if structure not in STRUCTURES:
        raise CurvatureError(
            f"unknown structure {structure!r}; choose one of {', '.join(STRUCTURES)}"
        )
    return STRUCTURES[structure].parts(problem)
