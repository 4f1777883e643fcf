"""How long a grid takes, from small measurements on this machine."""

from __future__ import annotations

from dataclasses import replace

import torch

from asdl_marglik import blocks_of
from ntkmarglik.machine.speed import Speed, seconds
from ntkmarglik.programs.classify.preflight import Sizes
from ntkmarglik.programs.grid.bound import Bound, exact_bound
from ntkmarglik.programs.grid.config import GridConfig
from ntkmarglik.programs.grid.evaluate import (
    CHOOSING,
    Evaluator,
    Reference,
    n_blocks,
    values_of,
)

# data points of two timings, which tell what grows with the data from what does not
FEW, MORE = (16, 48)
VALUE = 6e-5  # seconds for a block at one value of a prior grid, once its spectrum is known
BLOCK = 5e-4  # and for any block that is cut out of the kernel of all rows
MIXING = 60  # copies of a kernel take as long as the product with the roots on both sides


def sizes_of(reference: Reference, bound: Bound) -> Sizes:
    """The numbers that decide what a block of the bound costs."""
    weights = dict(reference.model.named_parameters())
    blocks = blocks_of(weights, reference.weight_blocks).values()
    return Sizes(
        structure=bound.structure,
        modules=tuple(sum(weights[name].numel() for name in block) for block in blocks),
        subset=bound.subset,
        outputs=_rows_per_datum(reference, bound),
    )


def _rows_per_datum(reference: Reference, bound: Bound) -> int:
    if bound.by_gradients:
        return reference.root_samples if bound.root == "sampled" else 1
    return bound.n_columns or reference.data.n_classes


def shares_kernel(reference: Reference, bounds: list[Bound]) -> bool:
    """Whether the exact value is asked for and comes from the kernel of all rows, which then serves
    other bounds.
    """
    exact = exact_bound(reference.data.n_data)
    sizes = sizes_of(reference, exact)
    return exact in bounds and sizes.rows <= sizes.n_parameters


def seconds_of(reference: Reference, bounds: list[Bound], config: GridConfig) -> list[float]:
    """Estimated time of each bound on the whole grid; that of a shared kernel is counted with the
    exact value.
    """
    prior = config.grid.hyperparameter == "prior"
    decomposition = torch.linalg.eigvalsh if prior else torch.linalg.cholesky
    speed = Speed.measured(reference.data.x_train, decomposition)
    share = shares_kernel(reference, bounds)
    passes: dict[tuple, tuple[float, float]] = {}  # per block and per datum
    seconds_of_bounds = []
    for bound in bounds:
        sizes = sizes_of(reference, bound)
        shared = share and bound.cut_from_kernel
        count = n_blocks(bound, reference.data, config)
        block = speed.algebra(sizes.structure, sizes.rows, sizes.modules)
        cut = shared and bound != bounds[0]  # out of the kernel of all rows
        if cut:
            block = speed.decompose * sizes.rows**3
        else:
            root = bound.root if bound.by_gradients else bound.root == "paper"
            kind = (bound.structure, bound.outputs, root)
            if kind not in passes:
                passes[kind] = _pass_seconds(reference, bound, config)
            per_block, per_datum = passes[kind]
            block += per_block + per_datum * bound.subset
        mixing = 0.0
        if shared:
            block += BLOCK + VALUE * config.grid.points * prior
            if bound.root != "paper":  # outputs are mixed once for all blocks of the same data
                blocks = bound.blocks(reference.data, config.place.seed, config.grid.blocks)
                n_data_blocks = len({tuple(b.index.tolist()) for b in blocks})
                rows = bound.subset * reference.data.n_classes
                mixing = n_data_blocks * MIXING * speed.copy * rows**2
        evaluations = 1 if prior else config.grid.points
        choosing = CHOOSING * block if bound.conditioned else 0.0
        seconds_of_bounds.append((count * block + mixing) * evaluations + choosing)
    return seconds_of_bounds


def _pass_seconds(reference: Reference, bound: Bound, config: GridConfig) -> tuple[float, float]:
    """Time of a block that does not depend on its size, and time for each datum; all values of a
    prior grid.
    """
    values = values_of(config.grid)
    evaluator = Evaluator(reference, config.updated(blocks=1), share=False)
    few = min(FEW, reference.data.n_data)
    more = min(MORE, reference.data.n_data)
    if bound.conditioned:  # a row costs as much as a datum with one output
        bound = replace(bound, partition="random")
    chosen = values if config.grid.hyperparameter == "prior" else values[-1:]

    def of(n: int) -> float:
        return seconds(lambda: evaluator(replace(bound, subset=n), chosen))

    first = of(few)
    second = of(more)
    slope = max(0.0, second - first) / max(1, more - few)
    return max(0.0, first - few * slope), slope
