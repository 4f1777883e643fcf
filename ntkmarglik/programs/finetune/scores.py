"""How good a fit is: on the test set, and on data that it has not seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from asdl_marglik import evaluating
from laplace_marglik import DiagonalLaplace, FixedPosterior, clml
from ntkmarglik.learn.evaluate import metrics
from ntkmarglik.programs.finetune.inputs import Part
from ntkmarglik.programs.finetune.objectives import LIKELIHOOD, Objective

TEMPERATURES = (1.0, 0.1, 0.01, 0.001, 0.0001)


def evaluated(model: nn.Module, part: Part) -> dict[str, float]:
    """Accuracy, its mean over classes, log-likelihood and calibration error at these weights."""
    with torch.no_grad(), evaluating(model):
        logits = torch.cat([model(x) for x, _ in part.batches()])
    return {**metrics(logits, part.y), "macro_accuracy": macro_accuracy(logits, part.y)}


def macro_accuracy(logits: Tensor, y: Tensor) -> float:
    """The mean over classes of the share of their examples that are recognised."""
    correct = (logits.argmax(1) == y).double()
    classes = y.unique()
    return torch.stack([correct[y == c].mean() for c in classes]).mean().item()


def conditional(
    objective: Objective, train: Part, held_out: Part, *, draws: int, generator: torch.Generator
) -> float:
    """The conditional evidence of held-out data, per datum, by a diagonal Laplace of the rest.

    The draws are narrowed by the factor, among TEMPERATURES, with which they classify the held-out
    data best; of those that do so equally well, by the one of the highest evidence.
    """
    model = objective.model
    posterior = DiagonalLaplace(model, LIKELIHOOD, objective.prior, train.batches()).posterior()
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    scores = []
    for temperature in TEMPERATURES:
        draw = torch.Generator(generator.device).manual_seed(seed)
        score = clml(
            model,
            LIKELIHOOD,
            posterior,
            held_out.batches(),
            samples=draws,
            temperature=temperature,
            generator=draw,
        )
        draw.manual_seed(seed)  # the same draws again
        p = averaged(model, posterior, held_out, draws, draw, temperature)
        accuracy = (p.argmax(1) == held_out.y).double().mean().item()
        scores.append((accuracy, score.total / score.n_data))
    _, evidence = max(scores)
    return evidence


@torch.no_grad()
def averaged(
    model: nn.Module,
    posterior: FixedPosterior,
    part: Part,
    draws: int,
    generator: torch.Generator,
    temperature: float = 1.0,
) -> Tensor:
    """Probabilities [n, C], averaged over draws of the weights."""
    p: Tensor | float = 0.0
    with evaluating(model):
        for _ in range(draws):
            weights = posterior.sample(generator, temperature)
            logits = [functional_call(model, weights, (x,)) for x, _ in part.batches()]
            p = p + torch.cat(logits).softmax(1)
    assert isinstance(p, Tensor)
    return p / draws
