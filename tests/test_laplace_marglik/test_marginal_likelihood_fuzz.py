"""Random networks and evidence problems against the naive reference: values, and gradients in every
hyperparameter.

Values are those of `reference.evidence`: Jacobian rows datum by datum and output by output, by
plain autograd. Gradients are compared along one random direction for each hyperparameter with
central differences of that value, which need no second derivative (torch's own are wrong for
weight_norm, and missing or wrong elsewhere). The reference has no Kronecker form of some weights
(attention, grouped convolutions, raw matrix products); there, the gradients of "kfac" are compared
with differences of the library's own value.

`pytest -m slow` runs more seeds, NTKMARGLIK_FUZZ of them, and prints those that fail.
"""

import os
from collections import Counter
from dataclasses import dataclass, field

import pytest
import reference
import torch
from fuzz import LIKELIHOODS, PRIORS, ROOTS, STRUCTURES, draw
from fuzz_pieces import ACTIVATIONS, HEADS, PIECES
from torch import nn

from asdl_marglik import CurvatureError

SEEDS = range(150)
STEP = 1e-5
# for want of what a case may be refused its gradients; anything else is a failure
ALLOWED_REFUSALS = ["the derivative for '_cdist_backward' is not implemented"]

QUICK = 60  # random cases of a contributor's loop


@dataclass
class Counts:
    """What has been compared so far."""

    cases: int = 0
    values: int = 0
    gradients: int = 0
    # (seed, name) of directions without a derivative that can be measured
    kinks: list = field(default_factory=list)
    refusals: list = field(default_factory=list)  # (seed, reason)

    def __str__(self):
        reasons = dict(Counter(reason for _, reason in self.refusals))
        kinks, refusals = (
            f"{len(self.kinks)} at a kink {self.kinks}",
            f"{len(self.refusals)} refused {reasons}",
        )
        checked = f"{self.cases} cases, {self.values} values, {self.gradients} gradients"
        return f"{checked}, {kinks}, {refusals}"


COUNTS = Counts()


class InOrder(torch.autograd.Function):
    """The identity; cotangents get the memory layout of a new tensor."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()  # which an activation may overwrite

    @staticmethod
    def backward(ctx, g):
        return g.contiguous()


class Sound(nn.Module):
    """The model on a copy of its input, which it may change in place, with right derivatives of its
    norms.

    torch 2.13 differentiates batch_norm (of a single datum) and instance_norm wrongly, first
    derivatives included, if the cotangent is transposed, as it is where positions become tokens.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        handles = [norm.register_forward_hook(lambda m, a, y: InOrder.apply(y)) for norm in norms]
        try:
            return self.model(x.clone())
        finally:
            for handle in handles:
                handle.remove()


class Oracle:
    """The evidence of a case by its definition, at the current values of the hyperparameters of
    `ml`.
    """

    def __init__(self, case, ml):
        self.case, self.ml, self.model = case, ml, Sound(case.model)
        self.names = [f"model.{name}" for name in ml.weights]
        self.kronecker = {f"model.{name}" for name in ml._planned(case.x.clone()).kronecker}
        self._measured = None, None

    @property
    def knows_factors(self):
        """Whether the reference has Kronecker factors for all weights for which the library has."""
        _, calls = reference.record(self.model, self.case.x[:1])
        layers = [prefix for prefix, module in reference.kron_layers(self.model) if module in calls]
        return self.kronecker <= {
            f"{prefix}.{role}" for prefix in layers for role in ("weight", "bias")
        }

    @property
    def inputs(self):
        return self.case.x if self.ml.augment is None else self.ml.augment(self.case.x).detach()

    def measured(self):
        """Outputs f [n, C...] and Jacobian J [n, C, P]; kept while augmentation and network stay as
        they are.
        """
        moving = [
            *([self.ml.augment.eta] if self.ml.augment else []),
            *self.case.model.parameters(),
        ]
        versions = [p._version for p in moving]
        if self._measured[0] != versions:
            weights, f, J = list(self.ml.weights.values()), [], []
            for copies in reference.batches(self.inputs, self.ml.augment is not None):
                f.append(sum(map(self.model, copies)) / len(copies))
                J.append(torch.stack([row(output, weights) for output in f[-1].flatten()]))
            self._measured = versions, (torch.cat(f).detach(), torch.stack(J))
        return self._measured[1]

    def cotangents(self, likelihood, f):
        """Columns of the root; those of a true one sum to zero, and to the square root of rounding
        if made by eigh.
        """
        W = reference.cotangents(likelihood, f, self.case.columns, self.case.root)
        if self.case.cotangents_follow_outputs:
            W = W.unflatten(1, (f.shape[1], -1))
            W = (W - W.mean(1, keepdim=True)).flatten(1, 2)
        return W

    def evidence(self):
        case, ml, (f, J) = self.case, self.ml, self.measured()
        sigma, tau = getattr(ml.likelihood, "sigma", 1.0), ml.likelihood.log_temperature.exp()
        likelihood = reference.Likelihood(case.likelihood, sigma, tau)
        theta = {
            n: ml.prior.log_precision[ml.prior.groups[n]].expand(w.numel())
            for n, w in ml.weights.items()
        }
        W = self.cotangents(likelihood, f)
        if case.structure == "kfac":
            log_det = self.kfac_log_det(J, W, theta)
        else:
            blocks = reference.module_blocks if case.blocks == "module" else reference.tensor_blocks
            delta = torch.cat([*theta.values()]).exp()
            log_det = reference.log_det_ratio(
                case.structure, reference.rows(J, W), delta, blocks(self.model, self.names)
            )
        scale = case.n_data / len(f)
        fit = scale * reference.log_prob(likelihood, f, case.y)
        log_det = scale * J.shape[1] / W.shape[2] * log_det
        scatter = sum(
            (t.exp() * (ml.weights[n] - ml.prior.mean_of(n)).flatten() ** 2).sum()
            for n, t in theta.items()
        )
        return reference.Evidence(fit - 0.5 * scatter - 0.5 * log_det, fit, scatter, log_det)

    def kfac_log_det(self, J, W, theta):
        """Kronecker factors from the reference, exact blocks of other weights from the rows."""
        kronecker = [name for name in self.names if name in self.kronecker]
        augmented = self.ml.augment is not None
        factors = reference.kfac(self.model, self.inputs, W, kronecker, self.case.kfac, augmented)
        V = reference.rows(J, W)
        total = 0.0
        for name, block in zip(
            self.names, reference.tensor_blocks(self.model, self.names), strict=True
        ):
            parts = factors.get(name) or (V[:, block].mT @ V[:, block],)
            total = total + reference.kfac_log_det(
                {name: parts}, theta[name.removeprefix("model.")].exp()
            )
        return total


def row(output, weights):
    """The gradient of one output in all weights."""
    found = torch.autograd.grad(output, weights, retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in found])


def evaluated(case, ml):
    """The library's evidence, and its gradient in each hyperparameter (zero where it has none)."""
    x = case.x.clone()
    evidence = ml(x, case.y, case.columns)
    parameters = ml.hyperparameters()
    evidence.total.backward()
    assert torch.equal(x, case.x), "the data were changed"
    assert all(w.grad is None for w in ml.weights.values()), "a weight has received a gradient"
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    return evidence, dict(
        zip(hyperparameter_names(ml), zip(parameters, gradients, strict=True), strict=True)
    )


def hyperparameter_names(ml):
    modules = {
        "prior": ml.prior,
        "likelihood": ml.likelihood,
        "augment": ml.augment or nn.Module(),
        "": ml.model,
    }
    names = {
        id(p): f"{k}.{name}".lstrip(".")
        for k, m in modules.items()
        for name, p in m.named_parameters()
    }
    return [names[id(p)] for p in ml.hyperparameters()]


def slope(value, parameter, direction, step):
    """Central difference of value() in a direction of `parameter`, which is put back after."""
    kept, ends = parameter.detach().clone(), []
    with torch.no_grad():
        for sign in (1, -1):
            parameter.copy_(kept + sign * step * direction)
            with torch.enable_grad():  # rows are derivatives
                ends.append(float(value().detach()))
        parameter.copy_(kept)
    return (ends[0] - ends[1]) / (2 * step)


def value_mismatches(case, evidence, truth):
    # in these roots the rounding of a zero eigenvalue enters by its square root
    tolerance = (
        1e-6 if case.cotangents_follow_outputs and case.root in ("symmetric", "eigen") else 1e-7
    )
    for part in ("log_likelihood", "scatter", "log_det_ratio", "total"):
        ours, theirs = (float(getattr(e, part).detach()) for e in (evidence, truth))
        COUNTS.values += 1
        if not abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)):  # also if NaN
            yield f"{part}: {ours!r}, but the reference has {theirs!r}"


def gradient_mismatches(case, gradients, value):
    generator = torch.Generator().manual_seed(case.seed)
    size = abs(float(value().detach()))
    for name, (parameter, gradient) in gradients.items():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        for module in case.model.modules():
            if (
                isinstance(module, nn.Embedding)
                and module.weight is parameter
                and module.padding_idx is not None
            ):
                direction[module.padding_idx] = 0  # which autograd holds constant
        ours = float((gradient * direction).sum())
        COUNTS.gradients += 1

        def agrees(a, b):
            return abs(a - b) <= 1e-4 * max(abs(a), abs(b)) + 3e-8 * max(1.0, size)

        theirs = slope(value, parameter, direction, STEP)
        if agrees(ours, theirs):
            continue
        finer = slope(value, parameter, direction, STEP / 10)
        if agrees(finer, theirs):
            yield f"gradient in {name}: {ours!r} along a direction, but differences give {theirs!r}"
        else:
            COUNTS.kinks.append((case.seed, name))


def check(seed):
    """Compare all of one case; the failure names the case and everything that differs."""
    case = draw(seed)
    COUNTS.cases += 1
    ml = case.marginal_likelihood()
    try:
        evidence, gradients = evaluated(case, ml)
    except CurvatureError as refusal:
        COUNTS.refusals.append((seed, str(refusal)))
        if not any(reason in str(refusal) for reason in ALLOWED_REFUSALS):
            raise AssertionError(f"refused: {refusal}\n{case}") from refusal
        with torch.no_grad():
            evidence, gradients = ml(case.x.clone(), case.y, case.columns), {}
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{case}") from error
    oracle = Oracle(case, ml)
    if case.structure != "kfac" or oracle.knows_factors:
        mismatches = list(value_mismatches(case, evidence, oracle.evidence()))
        mismatches += gradient_mismatches(case, gradients, lambda: oracle.evidence().total)
    else:
        mismatches = list(
            gradient_mismatches(
                case, gradients, lambda: ml(case.x.clone(), case.y, case.columns).total
            )
        )
    assert not mismatches, "\n".join([*mismatches, str(case)])


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.quick] * (s < QUICK)) for s in SEEDS]
)
def test_random_case(seed):
    check(seed)


def test_few_are_left_out():
    """Of what ran in this process."""
    assert len(COUNTS.kinks) <= 1 + 0.05 * COUNTS.gradients, COUNTS
    assert len(COUNTS.refusals) <= 1 + 0.05 * COUNTS.cases, COUNTS


def test_seeds_cover_everything():
    cases = [draw(seed) for seed in SEEDS]
    assert {name for case in cases for name in case.pieces} == {
        *PIECES,
        *ACTIVATIONS,
        *(f"head {h}" for h in HEADS),
    }
    choices = {"structure": STRUCTURES, "root": ROOTS, "likelihood": LIKELIHOODS, "prior": PRIORS}
    choices |= {"chunk": (None, 1, 2, 3), "copies": (None, 1, 2, 3), "saturated": (False, True)}
    choices |= {"kfac": ("expand", "reduce"), "blocks": ("module", "tensor")}
    for name, expected in choices.items():
        assert {getattr(case, name) for case in cases} == set(expected), name
    # rows whose cotangents depend on the outputs, of weights that no rule covers, differentiated in
    # the forward pass
    hard = [case for case in cases if case.cotangents_follow_outputs and has_persample_weight(case)]
    ways = {(case.copies is not None, bool(case.hyper)) for case in hard}
    assert ways >= {(True, False), (False, True), (True, True)}
    assert {case.structure for case in hard if case.copies or case.hyper} == set(STRUCTURES)


def has_persample_weight(case):
    return "per-sample" in case.marginal_likelihood().describe(case.x.clone())


@pytest.mark.slow
def test_many_random_cases():
    first, count = SEEDS.stop, int(os.environ.get("NTKMARGLIK_FUZZ", 2000))
    failed = []
    for seed in range(first, first + count):
        try:
            check(seed)
        except Exception as error:
            failed.append(seed)
            print(f"\n{type(error).__name__}: {error}", flush=True)
    print(f"\n{COUNTS}\nfailing seeds: {failed}", flush=True)
    assert not failed
