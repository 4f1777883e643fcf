"""What the ranks of test_distributed.py do: the same on several ranks and on one, and compare.

`torchrun ... distributed_programs.py FOLDER NAME ...` makes checks of the library, and runs of
distributed_runs.py; many in one start, since every process spends seconds importing torch.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import CASES, seeded
from distributed_runs import RUNS, alone, compare
from torch import nn

from asdl_marglik import STRUCTURES, CurvatureError
from laplace_marglik import (
    DataEmphasizedELBO,
    GaussianPrior,
    MarginalLikelihood,
    Ranks,
    SampledLaplace,
    evidence_by_blocks,
)
from laplace_marglik.posterior.sampled import ConjugateGradients, Sgd
from ntkmarglik.problem.augment import AffineAugmentation


def close(found, expected, what, rtol=1e-9):
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=rtol / 10, msg=lambda m: f"{what}: {m}"
    )


def wide():
    """A network whose rows are kept as factors."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(144, 12), nn.Tanh(), nn.Linear(12, 3)
    ), torch.randn(5, 1, 12, 12).double()


def case(name):
    return seeded(wide)() if name == "wide" else next(c for c in CASES if c.name == name).make()


def estimates(ranks, name, structure, *, augment=0, prior="layerwise", streamed=False, **options):
    """Evidence and gradients of a block or of batches of all data, with ranks or (None) without."""
    model, x, y = case(name)
    x, y = torch.cat([x, -x, x / 2])[:7], torch.cat([y, y, y])[:7]  # an odd number
    module = AffineAugmentation(augment, flip=True, init=0.2).double() if augment else None
    ml = MarginalLikelihood(
        model,
        "classification",
        n_data=7 if streamed else 20,
        prior=GaussianPrior(model, prior, 0.3),
        structure=structure,
        augment=module,
        ranks=ranks,
        generator=torch.Generator().manual_seed(1),
        **options,
    )
    if streamed:
        batches = list(zip(x.split(3), y.split(3), strict=True))  # the last has one datum
        evidence = ml.full_batch(batches)
    else:
        evidence = ml(x, y)
    return evidence.total.detach(), torch.autograd.grad(evidence.total, ml.hyperparameters())


def check_estimates(ranks, names=("wide", "mininet")):
    for structure in STRUCTURES:
        for name in names:
            for options in (
                {"outputs": 2, "root": "fisher", "columns": "iid", "streamed": True},
                {"outputs": None, "prior": "diagonal", "augment": 2, "streamed": True},
                {"outputs": None, "augment": 1, "chunk": 2},
                {"root": "sampled", "samples": 2, "augment": 1, "streamed": True},
                {"outputs": 1, "augment": 2, "kfac": "reduce", "row_dtype": torch.float16},
            ):
                expected, found = (estimates(r, name, structure, **options) for r in (None, ranks))
                for e, f in zip((expected[0], *expected[1]), (found[0], *found[1]), strict=True):
                    close(f, e, f"{structure} {name} {options}")


def check_wide(ranks):
    check_estimates(ranks, ["wide"])


def check_fixup(ranks):
    check_estimates(ranks, ["fixup"])


def pictures(n=7):
    model, x, y = case("mininet")
    x, y = torch.cat([x, -x])[:n], torch.cat([y, y])[:n]
    return model, list(zip(x.split(3), y.split(3), strict=True))  # the last batch has one datum


def by_blocks(ranks, structure, per_gradient):
    """Gradients in the augmentation of one block after the other, or of some together."""
    model, batches = pictures()
    ml = MarginalLikelihood(
        model,
        "classification",
        n_data=7,
        prior=GaussianPrior(model, "layerwise", 0.3),
        structure=structure,
        augment=AffineAugmentation(2, init=0.2).double(),
        ranks=ranks,
        generator=torch.Generator().manual_seed(1),
    )
    evaluate = evidence_by_blocks(ml, batches, torch.Generator().manual_seed(2), per_gradient)
    return [g for _ in batches for g in torch.autograd.grad(evaluate().total, ml.hyperparameters())]


def check_blocks(ranks):
    for structure, per_gradient in (("kfac", 1), ("kfac", 2), ("diag", 1)):
        alone, shared = (by_blocks(own, structure, per_gradient) for own in (None, ranks))
        for e, f in zip(alone, shared, strict=True):
            close(f, e, f"{structure} by {per_gradient} blocks")


def samples(ranks, solver, scaling, curvature):
    model, x, y = case("mlp")
    batches = list(zip(x.split(2), y.split(2), strict=True))
    posterior = SampledLaplace(
        model,
        "classification",
        n_data=5,
        prior=GaussianPrior(model, "layerwise", 0.3),
        samples=2,
        solver=solver,
        scaling=scaling,
        curvature=curvature,
        ranks=ranks,
        generator=torch.Generator().manual_seed(1),
    )
    precision = posterior.fit(batches).update_prior(batches)
    return (
        precision,
        posterior.weight_samples,
        posterior.mode,
        posterior.log_evidence(batches, rungs_=2).total,
    )


def check_samples(ranks):
    exact = ConjugateGradients(1e-12, 4, rows=3)
    steps = Sgd(4, tolerance=1e3, noise_in="data")
    for settings in (
        (exact, "g-prior", "outputs"),
        (steps, "none", "outputs"),
        (exact, "none", "averaged"),
        (steps, "none", "averaged"),
    ):
        expected, found = (samples(r, *settings) for r in (None, ranks))
        for e, f in zip(expected, found, strict=True):
            close(f, e, str(settings), rtol=1e-6)


def check_bounds(ranks):
    found = []
    for r in (None, ranks):
        model, batches = pictures()
        generator = torch.Generator().manual_seed(1)
        augment = AffineAugmentation(2, init=0.2).double()
        elbo = DataEmphasizedELBO(
            model,
            "classification",
            n_data=7,
            prior=GaussianPrior(model),
            augment=augment,
            generator=generator,
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
            model,
            "classification",
            n_data=7,
            prior=GaussianPrior(model),
            ranks=ranks,
            generator=generator,
        )
        return (
            ml.full_batch(options.get("batches", batches))
            if "x" not in options
            else ml(*options["x"])
        )

    for options, words in (
        ({"seed": ranks.rank}, "different blocks"),
        ({"x": [t[:1] for t in batches[0]]}, "cannot be shared"),
        ({"batches": batches[:2]}, "6 data points in all"),
    ):
        with pytest.raises(CurvatureError, match=words):
            estimate(**options)


def main():
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    runs = [name for name in names if name in RUNS]
    alone(runs, folder / "one")
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    ranks = Ranks()
    for name in names:
        start = time.perf_counter()
        if name in RUNS:
            compare(ranks, name, folder)
        else:
            globals()[f"check_{name}"](ranks)
        ranks.barrier(f"end of {name}")
        if ranks.first:
            print(f"{name}: {time.perf_counter() - start:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
