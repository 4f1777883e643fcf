"""Learned weight decay in your own loop: one precision per layer of a small CNN on digits.

python examples/own_loop.py
"""

import argparse

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from laplace_marglik import EvidenceLearner, GaussianPrior, MarginalLikelihood
from ntkmarglik.problem.data import load
from ntkmarglik.problem.models import build

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--figure", default="own_loop.png")
options = parser.parse_args()

torch.manual_seed(0)
data = load("digits", "data")
model = build("cnn", data.input_shape, data.n_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

prior = GaussianPrior(model, "layerwise", precision=0.01)
ml = MarginalLikelihood(model, "classification", n_data=data.n_data, prior=prior)
learner = EvidenceLearner(ml, (data.x_train, data.y_train), rows=200, steps_per_block=10)
learner.attach(optimizer)  # adds the learned weight decay to every step

history = []
for _ in range(options.epochs):
    for batch in torch.randperm(data.n_data).split(128):
        optimizer.zero_grad()
        ml.data_loss(model(data.x_train[batch]), data.y_train[batch]).backward()
        optimizer.step()
    learner.round()  # ten steps of the prior on a block of the evidence
    history.append(prior.precision.tolist())

with torch.no_grad():
    loss = F.cross_entropy(model.eval()(data.x_test), data.y_test).item()
low, high = learner.measure().interval
print(f"evidence per datum: {low / data.n_data:.3f} to {high / data.n_data:.3f}")
print(f"test log-likelihood: {-loss:.4f}")
for name, decay in prior.weight_decay(data.n_data).items():
    print(f"  weight decay of {name:14s} {decay:.2e}")

figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
for number, name in enumerate(prior.group_names):
    style = "-" if name.endswith("weight") else ":"
    axis.semilogy([row[number] for row in history], style, color=f"C{number // 2}", label=name)
axis.set(xlabel="epoch", ylabel="prior precision", title="What each layer has learned")
axis.legend(fontsize="small", ncols=2)
figure.savefig(options.figure, dpi=120)
print(f"wrote {options.figure}")
