"""What the ranks of test_distributed.py do; started by torchrun, since every process spends seconds importing torch.

`python -m torch.distributed.run ... distributed_programs.py library` compares, for every estimator, a block that is
shared with the same block on one process.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from cases import CASES, seeded
from laplace_marglik import (
    DataEmphasizedELBO,
    GaussianPrior,
    MarginalLikelihood,
    Ranks,
    SampledLaplace,
    evidence_by_blocks,
)
from laplace_marglik.sampled import ConjugateGradients, Sgd
from torch import nn

from ntkmarglik.augment import AffineAugmentation

STRUCTURES = ("ntk", "full", "blockdiag", "kfac", "diag")
PICTURES = ("mininet", "fixup", "wide")


def close(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10, msg=lambda m: f"{what}: {m}")


def wide():
    """A network whose rows are kept as factors."""
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 12), nn.Tanh(), nn.Linear(12, 3)), torch.randn(5, 1, 12, 12).double()


def case(name):
    return seeded(wide)() if name == "wide" else next(c for c in CASES if c.name == name).make()


def estimates(ranks, name, structure, *, augment=0, prior="layerwise", streamed=False, **options):
    """Evidence and gradients, of a block or of all data in batches, with these ranks or (None) without."""
    model, x, y = case(name)
    x, y = torch.cat([x, -x, x / 2])[:7], torch.cat([y, y, y])[:7]  # an odd number
    module = AffineAugmentation(augment, flip=True, init=0.2).double() if augment else None
    ml = MarginalLikelihood(
        model, "classification", n_data=7 if streamed else 20, prior=GaussianPrior(model, prior, 0.3),
        structure=structure, augment=module, ranks=ranks, generator=torch.Generator().manual_seed(1), **options,
    )  # fmt: skip
    if streamed:
        batches = list(zip(x.split(3), y.split(3), strict=True))  # the last has one datum
        evidence = ml.full_batch(batches)
    else:
        evidence = ml(x, y)
    return evidence.total.detach(), torch.autograd.grad(evidence.total, ml.hyperparameters())


def check_estimates(ranks):
    for structure in STRUCTURES:
        for name in ("mlp", *PICTURES):
            for options in (
                {"outputs": 2, "root": "fisher", "columns": "iid", "streamed": True},
                {"prior": "diagonal", "outputs": 1, "chunk": 2},
                {"outputs": None, "augment": 2, "streamed": True}, {"outputs": None, "augment": 1, "chunk": 2},
                {"outputs": 1, "augment": 2, "kfac": "reduce", "row_dtype": torch.float16},
            ):  # fmt: skip
                if "augment" not in options or name in PICTURES:
                    expected, found = (estimates(r, name, structure, **options) for r in (None, ranks))
                    for e, f in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
                        close(f, e, f"{structure} {name} {options}")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    ranks = Ranks()
    for name in sys.argv[1:]:
        globals()[f"check_{name}"](ranks)
        ranks.barrier(f"end of {name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
