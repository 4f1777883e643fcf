"""The prior's state and its first precisions."""

import pytest
import torch
from small_networks import mlp

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
