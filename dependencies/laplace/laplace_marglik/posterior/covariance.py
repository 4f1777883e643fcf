"""The covariance of some weights under a posterior, and of outputs that are linear in them.

A covariance is given by features of Jacobian rows J, with signs:

    J Sigma J^T = sum_i sign_i F_i F_i^T,   F_i = features of the rows [n, C, q_i]

so that a form of Sigma says its features and how it is sampled. Features come one weight after
the other: rows of all weights are never in memory together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from asdl_marglik.passes.forward import Form

Features = Iterator[tuple[float, Tensor]]  # signs, and features [n, C, q]
Shapes = Mapping[str, Sequence[int]]
FORMS: dict[str, type[Covariance]] = {}  # by the name under which a state keeps them


class Factored(Protocol):
    """How the weights of a pass enter it: the part of a plan that covariances look at."""

    @property
    def kronecker(self) -> AbstractSet[str]:
        """Weights whose rows have factors."""

    @property
    def positions(self) -> Mapping[str, int]:
        """Shared positions of each of those."""

    @property
    def uses_of(self) -> Mapping[str, Sequence[tuple[int, str]]]:
        """Uses of each weight, and its role in them."""

    @property
    def rules(self) -> Mapping[str, str]:
        """The rule behind the rows of each weight."""


class Rows(Protocol):
    """Jacobian rows of the outputs of some inputs: a `Chunk`, or rows that were given."""

    n: int
    copies: int
    f: Tensor

    @property
    def k(self) -> int:
        """Outputs of each input."""

    @property
    def plan(self) -> Factored:
        """How the weights enter."""

    def rows(self, name: str) -> Tensor:
        """Rows [n, C, *shape] of a weight."""

    def input_factors(self, name: str, form: Form) -> list[Tensor | None]:
        """Patches of every use of a weight with factors."""

    def output_factors(self, name: str, form: Form) -> list[Tensor]:
        """Positions of every use of a weight with factors."""


@dataclass(frozen=True)
class Unfactored:
    """No weight has factors."""

    kronecker: AbstractSet[str] = frozenset()
    positions: Mapping[str, int] = field(default_factory=dict)
    uses_of: Mapping[str, Sequence[tuple[int, str]]] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)


class GivenRows:
    """Rows from Jacobians [n, C, P].

    Args:
        J: the Jacobians.
        shapes: of the weights by name, in their order.
    """

    def __init__(self, J: Tensor, shapes: Shapes):
        self.n, self.k = J.shape[:2]
        self.copies = 1
        self.f = J[:, :, 0]
        self.plan: Factored = Unfactored()
        parts = J.split(list(sizes_of(shapes).values()), 2)
        self._rows = dict(zip(shapes, parts, strict=True))

    def rows(self, name: str) -> Tensor:
        """Rows [n, C, numel] of a weight."""
        return self._rows[name]

    def input_factors(self, name: str, form: Form) -> list[Tensor | None]:
        """None: rows are all there is."""
        return []

    def output_factors(self, name: str, form: Form) -> list[Tensor]:
        """None: rows are all there is."""
        return []


class Covariance(ABC):
    """Sigma of some weights; a dataclass of plain numbers, names and tensors.

    Attributes:
        form: name of the form in a state.
        shapes: of its weights by name.
    """

    form: ClassVar[str]
    shapes: Shapes

    def __init_subclass__(cls) -> None:
        FORMS[cls.form] = cls

    @abstractmethod
    def features(self, chunk: Rows) -> Features:
        """Signed features of the Jacobian rows of a chunk, one weight after the other."""

    @abstractmethod
    def sample(self, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Deviations [k, *shape] of each weight, in float64.

        Args:
            k: number of samples.
            generator: source of the noise.
        """

    @abstractmethod
    def numbers_per_output(self, plan: Factored, copies: int) -> int:
        """Numbers in memory for one output of one datum, where features are largest.

        Args:
            plan: how the weights enter.
            copies: augmented copies of each input.
        """

    def of_outputs(self, chunk: Rows) -> Tensor:
        """Covariance [n, C, C] of the outputs of each datum, in float64."""
        total = chunk.f.new_zeros(chunk.n, chunk.k, chunk.k, dtype=torch.float64)
        for sign, F in self.features(chunk):
            total = total + sign * (F @ F.mT).double()
        return total

    def of_all_outputs(self, chunks: Sequence[Rows]) -> Tensor:
        """Covariance [n C, n C] of the outputs of all data of some chunks, in float64."""
        size = sum(chunk.n * chunk.k for chunk in chunks)
        total = chunks[0].f.new_zeros(size, size, dtype=torch.float64)
        for by_chunk in zip(*map(self.features, chunks), strict=True):
            F = torch.cat([features.flatten(0, 1) for _, features in by_chunk]).double()
            total = total + by_chunk[0][0] * (F @ F.mT)
        return total

    def state(self) -> dict[str, Any]:
        """Everything it is made of, as plain tensors, numbers and names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        plain = {n: [*v] if isinstance(v, tuple) else v for n, v in values.items()}
        plain["shapes"] = {name: list(shape) for name, shape in self.shapes.items()}
        return {"form": self.form, **plain}


def from_state(state: Mapping[str, Any], device: torch.device) -> Covariance:
    """The covariance that a state is of.

    Args:
        state: from `Covariance.state`.
        device: where its tensors go.
    """
    values = {name: _placed(value, device) for name, value in state.items() if name != "form"}
    return FORMS[state["form"]](**values)


def _placed(value: Any, device: torch.device) -> Any:
    """Tensors, alone or in a list, on a device."""
    if isinstance(value, list):
        return tuple(t.to(device) for t in value)
    return value.to(device) if isinstance(value, Tensor) else value


def rows_of(chunk: Rows, name: str) -> Tensor:
    """Jacobian rows [n, C, numel] of a weight."""
    return chunk.rows(name).reshape(chunk.n, chunk.k, -1)


def normal(k: int, size: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal noise [k, size] in float64, drawn where the generator is."""
    noise = torch.randn(k, size, generator=generator, dtype=torch.float64, device=generator.device)
    return noise.to(like.device)


def by_weight(flat: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    """Samples [k, P] as tensors [k, *shape] by name."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = zip(shapes.items(), flat.split(sizes, 1), strict=True)
    return {name: part.reshape(len(flat), *shape) for (name, shape), part in parts}


def sizes_of(shapes: Shapes) -> dict[str, int]:
    """Numbers in each weight."""
    return {name: torch.Size(shape).numel() for name, shape in shapes.items()}
