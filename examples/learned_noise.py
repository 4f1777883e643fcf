"""Regression with learned noise: a curve, its noise, and how sure the network is of it.

python examples/learned_noise.py
"""

import argparse

import matplotlib.pyplot as plt
import torch
from torch import nn

from laplace_marglik import EvidenceLearner, Gaussian, GaussianPrior, MarginalLikelihood

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=800)
parser.add_argument("--figure", default="learned_noise.png")
options = parser.parse_args()

torch.manual_seed(0)
TRUE_NOISE = 0.3
x = torch.cat([torch.rand(75, 1) * 2 - 3, torch.rand(75, 1) * 2 + 1])  # nothing between -1 and 1
y = torch.sin(2 * x) + TRUE_NOISE * torch.randn_like(x)

network = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)

likelihood = Gaussian(sigma=1.0)  # where the noise begins; it is learned unless told otherwise
prior = GaussianPrior(network, "layerwise", precision=0.1)
ml = MarginalLikelihood(network, likelihood, n_data=len(x), prior=prior)
# all data at once, every fifth epoch: they are few
learner = EvidenceLearner(ml, (x, y), rows=None, steps=10, burn_in=50, every=5)
learner.attach(optimizer)

noise = []
for _ in range(options.epochs):
    for batch in torch.randperm(len(x)).split(30):
        optimizer.zero_grad()
        ml.data_loss(network(x[batch]), y[batch]).backward()  # not the mean squared error
        optimizer.step()
    learner.round()
    noise.append(likelihood.sigma.item())

evidence = ml(x, y)
residual = (network(x) - y).square().mean().sqrt().item()
print(f"learned noise {noise[-1]:.3f}; the data were made with {TRUE_NOISE}")
print(f"root mean squared error on the same data {residual:.3f}")
print(f"evidence per datum {evidence.total.item() / len(x):.3f} ({evidence.status})")

posterior = ml.posterior([(x, y)])
line = torch.linspace(-4.5, 4.5, 200).unsqueeze(1)
prediction = posterior.predict(line)  # a normal distribution with the noise in it
mean, width = prediction.mean.flatten(), 2 * prediction.stddev.flatten()
for place in (-2.0, 0.0):
    nearest = (line.flatten() - place).abs().argmin()
    print(f"standard deviation of a prediction at {place:4.1f}: {width[nearest] / 2:.2f}")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
left.fill_between(line.flatten(), mean - width, mean + width, alpha=0.25, label="two deviations")
left.plot(line, mean, label="mean")
left.plot(x, y, ".", color="black", markersize=3, label="data")
left.set(xlabel="x", ylabel="y", ylim=(-3, 3))
left.legend(fontsize="small", loc="lower right")
right.plot(noise, label="learned")
right.axhline(TRUE_NOISE, color="C3", linestyle="--", label="true")
right.set(xlabel="epoch", ylabel="noise (standard deviation)", ylim=(0, None))
right.legend()
figure.savefig(options.figure, dpi=120)
print(f"wrote {options.figure}")
