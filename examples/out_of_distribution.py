"""How sure is a network of what it has never seen? Digits, and the same ones turned on their side.

python examples/out_of_distribution.py
"""

import argparse

import matplotlib.pyplot as plt
import torch
from sklearn.metrics import roc_auc_score

from laplace_marglik import EvidenceLearner, GaussianPrior, MarginalLikelihood
from ntkmarglik.problem.data import load
from ntkmarglik.problem.models import build

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--figure", default="out_of_distribution.png")
options = parser.parse_args()

torch.manual_seed(0)
data = load("digits", "data")
model = build("cnn", data.input_shape, data.n_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
prior = GaussianPrior(model, "layerwise", precision=1.0)
ml = MarginalLikelihood(model, "classification", n_data=data.n_data, prior=prior, structure="kfac")
batches = list(zip(data.x_train.split(250), data.y_train.split(250), strict=True))
learner = EvidenceLearner(
    ml, (data.x_train, data.y_train), rows=None, burn_in=10, every=10, total_rounds=options.epochs
)
learner.attach(optimizer)
for _ in range(options.epochs):
    model.train()
    for batch in torch.randperm(data.n_data).split(128):
        optimizer.zero_grad()
        ml.data_loss(model(data.x_train[batch]), data.y_train[batch]).backward()
        optimizer.step()
    learner.round()
model.eval()

posterior = ml.posterior(batches)  # KFAC of all data, at the learned prior
turned = data.x_test.rot90(1, (2, 3))


def entropy(p):
    """Of class probabilities [n, C], in nats."""
    return -(p * p.clamp_min(1e-30).log()).sum(1)


figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
for axis, kind, name in zip(axes, ("mode", "probit"), ("network", "posterior"), strict=True):
    known, unknown = (entropy(posterior.predict(x, kind)) for x in (data.x_test, turned))
    labels = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
    area = roc_auc_score(labels, torch.cat([known, unknown]))
    score = posterior.log_prob(data.x_test, data.y_test, kind).mean().item()
    print(f"learned {name:9s} test log-likelihood {score:.4f}, area under ROC {area:.3f}")
    bins = torch.linspace(0, 2.31, 25).tolist()
    axis.hist(known, bins, alpha=0.6, density=True, label="digits")
    axis.hist(unknown, bins, alpha=0.6, density=True, label="turned by 90 degrees")
    axis.set(xlabel="entropy of the prediction (nats)", title=f"{name}: area {area:.3f}")
axes[0].set_ylabel("density")
axes[0].legend()
figure.savefig(options.figure, dpi=120)
print(f"wrote {options.figure}")
