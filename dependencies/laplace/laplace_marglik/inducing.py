"""Blocks of rows conditioned on a small inducing set of rows, which refreshes itself.

Rows are pairs (datum, root column) of a true root, A = I + V P0^-1 V^T over all of them. For an
inducing set U of u rows that was fixed before the block B of b other rows was drawn,

    E_B [ log|A_U| + m log|A_{U+B} / A_U| ]  >=  log|A|,       m = (all rows - u) / b

(Fischer on the Schur complement). u = 0 is the bound of independent blocks, u + b = all rows is
exact, and a good U removes most of the slack. After an evaluation the kernel of U and B is there;
the next U is chosen among its rows by pivoted Cholesky, which costs no pass over the data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asdl_marglik import Ranks
from laplace_marglik import checks
from laplace_marglik.errors import MarglikError
from laplace_marglik.evidence.evidence import Evidence
from laplace_marglik.partition import Block

# rows per row of a block up to which all are put in random order; more are drawn one by one
FEW = 8


class InducingPartition:
    """Random blocks of rows, each conditioned on the same inducing rows.

    Args:
        n_data: data points N.
        n_outputs: outputs C of the network.
        rows: of a block, inducing rows included; at most N C.
        inducing: fraction of them that are inducing rows, at least 0 and below 1.
        n_columns: root columns that rows are drawn from; fewer than the outputs where the others
            are zero, as the last eigen column of a softmax; 1 for root "empirical", the draws of a
            datum for root "sampled".
        generator: source of the random draws.
        ranks: processes with a block each that share the inducing rows.
    """

    def __init__(
        self,
        n_data: int,
        n_outputs: int,
        rows: int,
        inducing: float = 0.5,
        *,
        n_columns: int | None = None,
        generator: torch.Generator | None = None,
        ranks: Ranks | None = None,
    ):
        self.n_data = checks.positive_integer("n_data", n_data)
        self.n_outputs = checks.positive_integer("n_outputs", n_outputs)
        self.n_columns = checks.positive_integer("n_columns", n_columns or n_outputs)
        self.rows = checks.positive_integer("rows", rows)
        if self.rows > self.n_rows:
            raise MarglikError(
                f"a block of {rows} rows, but {n_data} data points with {self.n_columns} root "
                f"columns each have {self.n_rows}; use rows={self.n_rows} (all) or fewer"
            )
        if not (isinstance(inducing, (int, float)) and 0 <= inducing < 1):
            raise MarglikError(
                "inducing is the fraction of a block's rows that are inducing rows, at least 0 "
                f"and below 1, got {inducing!r}"
            )
        self.n_inducing = min(round(inducing * self.rows), self.rows - 1)
        self.generator = generator or torch.Generator().manual_seed(torch.initial_seed())
        self.ranks = ranks
        self._inducing = self._drawn(self.n_inducing, torch.empty(0, dtype=torch.long))

    @property
    def n_rows(self) -> int:
        """All rows there are."""
        return self.n_data * self.n_columns

    @property
    def sample_weight(self) -> float:
        """m: how often the rows of a block that are not inducing count."""
        return (self.n_rows - self.n_inducing) / (self.rows - self.n_inducing)

    @property
    def inducing_rows(self) -> Tensor:
        """(number of the datum, column) of each inducing row [u, 2]."""
        return self._pairs(self._inducing)

    def sample(self) -> Block:
        """The inducing rows and a random block of others; all sets of these are equally likely."""
        others = self._drawn(self.rows - self.n_inducing, self._inducing)
        data, columns = self._pairs(torch.cat([self._inducing, others])).unbind(1)
        index, position = data.unique(return_inverse=True)
        return Block(
            index=index,
            columns=columns[:, None],
            n_data_blocks=self.sample_weight,
            n_column_blocks=1,
            n_data=self.n_data,
            n_outputs=self.n_outputs,
            rows=torch.stack([position, columns], 1),
            n_inducing=self.n_inducing,
            n_columns=self.n_columns,
        )

    def update(self, block: Block, evidence: Evidence | None) -> None:
        """Choose the next inducing rows among those of a block that was evaluated.

        Args:
            block: from `sample()`.
            evidence: of that block; of several ranks, that of the first decides for all.
        """

        def chosen() -> Tensor:
            assert evidence is not None
            kernel = evidence.kernel_of_rows()
            n_rows = 0 if block.rows is None else len(block.rows)
            if kernel.n_rows != n_rows:
                raise MarglikError(
                    f"the evidence is of a block of {kernel.n_rows} rows, but this block has "
                    f"{n_rows}; give both of the same block"
                )
            order = kernel.pivots(self.n_inducing).cpu()
            data, columns = block.numbered_rows()[order].unbind(1)
            return data * self.n_columns + columns

        if self.ranks is None:
            self._inducing = chosen()
        else:
            self._inducing = self.ranks.from_first(chosen, "choice of inducing rows")

    def state_dict(self) -> dict[str, Any]:
        """What determines all later blocks."""
        return {
            "inducing": self._inducing.clone(),
            "sizes": self._sizes(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the partition whose state it is."""
        if list(state["sizes"]) != self._sizes():
            raise MarglikError(
                "the state is of a partition with [n_data, n_outputs, n_columns, rows, inducing "
                f"rows] = {list(state['sizes'])}, but this one has {self._sizes()}; build it with "
                "the same sizes"
            )
        self._inducing = state["inducing"].clone()
        self.generator.set_state(state["generator"])

    def _sizes(self) -> list[int]:
        return [self.n_data, self.n_outputs, self.n_columns, self.rows, self.n_inducing]

    def _pairs(self, numbers: Tensor) -> Tensor:
        """(datum, column) of rows by number [n, 2]."""
        return torch.stack([numbers // self.n_columns, numbers % self.n_columns], 1)

    def _drawn(self, count: int, excluded: Tensor) -> Tensor:
        """Distinct random rows by number that are not among the excluded ones [count]."""
        if self.n_rows <= FEW * self.rows:
            order = torch.randperm(self.n_rows, generator=self.generator)
            return order[~torch.isin(order, excluded)][:count]
        # Distinct numbers in the order in which they first come up: each set is equally likely.
        chosen: dict[int, None] = {}
        known = set(excluded.tolist())
        while len(chosen) < count:
            some = torch.randint(self.n_rows, (2 * count,), generator=self.generator)
            chosen.update(dict.fromkeys(n for n in some.tolist() if n not in known))
        return torch.tensor(list(chosen)[:count], dtype=torch.long)
