"""The prior's state, its first precisions, and what it makes of a covariance."""

import pytest
import torch
from small_networks import GROUPS, mlp, randn
from torch import nn
from variational_objectives import low_rank

from laplace_marglik import GaussianPrior, MarglikError

NAN, INF = float("nan"), float("inf")


@pytest.mark.quick
@pytest.mark.parametrize("mean", ["current", 0.3, "some"])
def test_the_means_of_a_prior_are_part_of_its_state(mean):
    model = mlp()
    given = {"2.weight": model[2].weight.detach().clone()} if mean == "some" else mean
    prior = GaussianPrior(model, mean=given)
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    want = prior.squares(dict(model.named_parameters()))
    again = GaussianPrior(
        model, mean={"2.weight": model[2].weight.detach()} if mean == "some" else given
    )
    again.load_state_dict(prior.state_dict())
    torch.testing.assert_close(again.squares(dict(model.named_parameters())), want)
    assert again.to(torch.float32).mean_of("2.weight").dtype == torch.float32


@pytest.mark.quick
def test_a_state_with_means_does_not_load_into_a_prior_without():
    model = mlp()
    with pytest.raises(RuntimeError, match="means"):
        GaussianPrior(model).load_state_dict(GaussianPrior(model, mean="current").state_dict())


@pytest.mark.quick
@pytest.mark.parametrize("value", [1e300, 1e-300, 0.0, INF])
def test_initial_precisions_that_overflow_are_refused(value):
    with pytest.raises(MarglikError, match="prior precision must be positive"):
        GaussianPrior(mlp(), precision=value)


def correlated(model):
    """A prior with a low-rank covariance of the first layer, around means."""
    mean = {"0.weight": randn(5, 4, seed=7)}
    return GaussianPrior(model, groups=GROUPS, mean=mean, covariance={"0.*": low_rank(model, "0.")})


def test_the_penalty_of_a_covariance_is_that_of_a_dense_gaussian():
    model = mlp()
    prior = correlated(model)
    with torch.no_grad():
        prior.log_precision.copy_(torch.tensor([0.5, -0.3]))
    (sigma,) = prior.covariance.values()
    names = list(sigma.diagonal)
    F = torch.cat([sigma._scaled[n] * sigma.diagonal[n].reshape(-1, 1) for n in names])
    dense = torch.diag(torch.cat([d.flatten() for d in sigma.diagonal.values()])) + F @ F.mT
    weights = dict(model.named_parameters())
    e = torch.cat([(weights[n] - prior.mean_of(n)).flatten() for n in names])
    head = sum(weights[n].square().sum() for n in weights if n not in names)
    first, second = prior.precision.detach().double()
    expected = first * (e @ dense.inverse() @ e) + second * head
    found = prior.penalty(weights)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, list(weights.values())),
        torch.autograd.grad(expected, list(weights.values())),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "use",
    [
        lambda prior, weights: prior.squares(weights),
        lambda prior, weights: list(prior.pulls(weights, 12)),
        lambda prior, weights: prior.weight_decay(12),
    ],
)
def test_a_covariance_is_refused_where_weights_have_to_be_independent(use):
    model = mlp()
    with pytest.raises(MarglikError, match=r"independent weights.*'0\.\*'"):
        use(correlated(model), dict(model.named_parameters()))


def test_the_penalty_of_shared_precisions_can_be_differentiated_twice():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    prior = GaussianPrior(model, "layerwise")
    with torch.no_grad():
        prior.log_precision.copy_(torch.tensor([0.3, -1.0, 2.0, 0.0]))
        model[0].bias.zero_()  # the norm has no derivative here, its square has
    names = [name for name, _ in model.named_parameters()]

    def penalty(*weights):
        return prior.penalty(dict(zip(names, weights, strict=True)))

    weights = tuple(model.parameters())
    by_hand = sum(d * w.square().sum() for d, w in zip(prior.precision, weights, strict=True))
    assert torch.allclose(penalty(*weights), by_hand, rtol=1e-12)
    assert torch.autograd.gradcheck(penalty, weights)
    assert torch.autograd.gradgradcheck(penalty, weights)
    by_func = torch.func.grad(penalty, argnums=(0, 1, 2, 3))(*(w.detach() for w in weights))
    assert torch.allclose(by_func[0], 2 * prior.precision[0] * weights[0], rtol=1e-12)
