"""What the ranks of test_distributed.py do; started by torchrun, since every process spends seconds importing torch.

`python -m torch.distributed.run ... distributed_programs.py library` compares, for every estimator, a block that is
shared with the same block on one process.
"""

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from asdl_marglik import CurvatureError
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


def close(found, expected, what, rtol=1e-9):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol / 10, msg=lambda m: f"{what}: {m}")


def wide():
    """A network whose rows are kept as factors."""
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 12), nn.Tanh(), nn.Linear(12, 3)), torch.randn(
        5, 1, 12, 12
    ).double()


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


def pictures(n=7):
    model, x, y = case("mininet")
    x, y = torch.cat([x, -x])[:n], torch.cat([y, y])[:n]
    return model, list(zip(x.split(3), y.split(3), strict=True))  # the last batch has one datum


def by_blocks(ranks, structure):
    """Gradients in the augmentation of one block after the other."""
    model, batches = pictures()
    ml = MarginalLikelihood(
        model, "classification", n_data=7, prior=GaussianPrior(model, "layerwise", 0.3), structure=structure,
        augment=AffineAugmentation(2, init=0.2).double(), ranks=ranks, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    evaluate = evidence_by_blocks(ml, batches, torch.Generator().manual_seed(2))
    return [g for _ in batches for g in torch.autograd.grad(evaluate().total, ml.hyperparameters())]


def check_blocks(ranks):
    for structure in ("kfac", "diag"):
        for e, f in zip(by_blocks(None, structure), by_blocks(ranks, structure), strict=True):
            close(f, e, f"{structure} by blocks")


def samples(ranks, solver, scaling):
    model, batches = pictures()
    posterior = SampledLaplace(
        model, "classification", n_data=7, prior=GaussianPrior(model, "layerwise", 0.3), samples=3, solver=solver,
        scaling=scaling, ranks=ranks, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    precision = posterior.fit(batches).update_prior(batches)
    return precision, posterior.weight_samples, posterior.mode, posterior.log_evidence(batches, rungs_=3).total


def check_samples(ranks):
    for solver, scaling in (
        (ConjugateGradients(1e-12, 6), "none"), (ConjugateGradients(1e-12, 6, rows=4), "g-prior"),
        (Sgd(3), "none"), (Sgd(3, noise_in="data"), "g-prior"),
    ):  # fmt: skip
        expected, found = (samples(r, solver, scaling) for r in (None, ranks))
        for e, f in zip(expected, found, strict=True):
            close(f, e, f"{solver} {scaling}", rtol=1e-6)


def check_elbo(ranks):
    found = []
    for r in (None, ranks):
        model, batches = pictures()
        generator = torch.Generator().manual_seed(1)
        augment = AffineAugmentation(2, init=0.2).double()
        elbo = DataEmphasizedELBO(
            model, "classification", n_data=7, prior=GaussianPrior(model), augment=augment, generator=generator
        )
        bounds = elbo.evaluate(batches, samples=3, ranks=r)
        found.append(torch.stack([bounds.elbo.total, bounds.de_elbo.total]))
    close(found[1], found[0], "bounds")


def check_refusals(ranks):
    """Mistakes are reported on all ranks, and leave no rank waiting."""
    model, batches = pictures()

    def estimate(seed=0, **options):
        generator = torch.Generator().manual_seed(seed)
        ml = MarginalLikelihood(
            model, "classification", n_data=7, prior=GaussianPrior(model), ranks=ranks, generator=generator
        )
        return ml.full_batch(options.get("batches", batches)) if "x" not in options else ml(*options["x"])

    for options, words in (
        ({"seed": ranks.rank}, "different blocks"),
        ({"x": [t[:1] for t in batches[0]]}, "cannot be shared"),
        ({"batches": batches[:2]}, "6 data points in all"),
    ):
        with pytest.raises(CurvatureError, match=words):
            estimate(**options)


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
