"""Bounds by name: a curvature structure on the blocks of a partition of data and outputs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import get_args

import torch

from asdl_marglik import STRUCTURES
from laplace_marglik import Block, ClassPartition, Partition
from laplace_marglik.evidence.gradient_rows import is_gradient
from laplace_marglik.likelihood.base import GradientRoot, Root
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.data import Dataset
from ntkmarglik.programs.grid.config import Grid

INDUCING = "inducing"
ANY_ROOT = "any"  # with all outputs in a block every root gives the same determinant


@dataclass(frozen=True)
class Bound:
    """One estimator of the evidence: STRUCTURE-S-K, and how data and outputs are dealt into its
    blocks.
    """

    structure: str
    subset: int
    outputs: str  # "all" | "single"
    columns: str = "shared"
    partition: str = "random"
    root: str = ANY_ROOT

    @property
    def conditioned(self) -> bool:
        """Whether its blocks are conditioned on inducing rows; S is then a number of rows."""
        return self.partition == INDUCING

    @property
    def by_gradients(self) -> bool:
        """Whether its rows are gradients of log-likelihoods, which have no outputs to choose."""
        return is_gradient(self.root)

    @property
    def n_columns(self) -> int | None:
        """Root columns in a block; None for all."""
        return None if self.outputs == "all" or self.by_gradients else 1

    @property
    def of_kernel(self) -> bool:
        """Whether its values are functions of the kernel of all rows: the curvature is exact."""
        return STRUCTURES[self.structure].guarantee == "exact"

    @property
    def cut_from_kernel(self) -> bool:
        """Whether its blocks can be cut out of the kernel of all outputs of all data."""
        return self.of_kernel and not self.conditioned and not self.by_gradients

    @property
    def ml_root(self) -> Root | GradientRoot:
        roots = (*get_args(Root), *get_args(GradientRoot))
        return next((root for root in roots if root == self.root), "fisher")

    def __str__(self) -> str:
        name = f"{self.structure}-{self.subset}-{'C' if self.outputs == 'all' else 1}"
        choices = (self.columns, self.partition, self.root)
        unusual = [choice for choice in choices if choice not in ("shared", "random", ANY_ROOT)]
        return " ".join([name, *unusual])

    def blocks(self, data: Dataset, seed: int, most: int = 0) -> list[Block]:
        """All blocks of its partition, or `most` of them drawn at random.

        Partitions of one seed fill their blocks in the same order, so that smaller blocks refine
        larger ones wherever the sizes divide each other: there, the smaller ones give the looser
        bound for certain.
        """
        assert not self.conditioned  # its blocks are drawn: `conditioned_blocks`
        generator = torch.Generator().manual_seed(seed)
        n, c = data.n_data, data.n_classes
        if self.partition == "class":
            partition: Partition = ClassPartition(
                data.y_train,
                c,
                self.subset,
                self.n_columns,
                columns=self.columns,
                generator=generator,
            )
        else:
            partition = Partition(
                n, c, self.subset, self.n_columns, columns=self.columns, generator=generator
            )
        if not most or most >= len(partition):
            return list(partition)
        chosen = torch.randperm(len(partition), generator=generator)[:most]
        return [partition[position] for position in chosen.sort().values.tolist()]


def exact_bound(n_data: int) -> Bound:
    """All rows in one block: no slack."""
    return Bound("full", n_data, "all")


def bounds_of(grid: Grid, n_data: int) -> list[Bound]:
    """Every combination of the chosen settings once; those that cannot matter are set to their
    usual value.
    """
    for name in ("structures", "subsets", "outputs", "columns", "partitions", "roots"):
        if not getattr(grid, name):
            raise NtkMarglikError(f"--{name} needs at least one value.")
    for subset in grid.subsets:
        if not 0 <= subset <= n_data:
            raise NtkMarglikError(
                f"--subsets {subset}, but there are {n_data} training data; use 1 to {n_data}, or "
                "0 for all."
            )
    exact = exact_bound(n_data)
    bounds = [exact] if grid.exact else []
    for structure, subset, outputs in itertools.product(
        grid.structures, grid.subsets, grid.outputs
    ):
        size = subset or n_data
        single = outputs == "single"
        for columns, partition, root in itertools.product(
            grid.columns, grid.partitions, grid.roots
        ):
            gradients = is_gradient(root)
            if partition == INDUCING:
                has_rows = not STRUCTURES[structure].additive
                if has_rows and (gradients or (single and root != "paper")):
                    bounds.append(Bound(structure, size, "single", "shared", INDUCING, root))
                continue
            bound = Bound(
                structure,
                size,
                "single" if gradients else outputs,
                columns if single and not gradients else "shared",
                partition if size < n_data else "random",
                root if single or gradients else ANY_ROOT,
            )
            whole = bound.of_kernel and size == n_data and bound.outputs == "all"
            bounds.append(exact if whole else bound)
    return list(dict.fromkeys(bounds))
