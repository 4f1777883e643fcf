"""From laplace-torch to here: the same calls, then online learning, then blocks of the kernel.

python examples/from_laplace_torch.py
"""

import argparse

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from laplace_marglik import EvidenceLearner, GaussianPrior, MarginalLikelihood
from laplace_marglik.compat import Laplace, marglik_training  # was: from laplace import ...
from ntkmarglik.problem.data import load
from ntkmarglik.problem.models import build

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--figure", default="from_laplace_torch.png")
options = parser.parse_args()

digits = load("digits", "data")
train = TensorDataset(digits.x_train, digits.y_train)
x_test, y_test, scores = digits.x_test, digits.y_test, {}


def report(name, probabilities):
    """Mean log-likelihood of the test images."""
    scores[name] = probabilities[range(len(y_test)), y_test].log().mean().item()
    print(f"{name:42s} test log-likelihood {scores[name]:.4f}")


# after training: a Laplace approximation of a network trained as always
torch.manual_seed(0)
model = build("cnn", digits.input_shape, digits.n_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
loader = DataLoader(train, batch_size=128, shuffle=True)
for _ in range(options.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
model.eval()
report("the network itself", model(x_test).softmax(1))
la = Laplace(model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
la.fit(DataLoader(train, batch_size=250))
la.optimize_prior_precision(method="marglik")
print(f"  learned precision, after training: {la.prior_precision.item():.3f}")
report("post-hoc, last layer, probit", la(x_test, link_approx="probit"))

# online: the prior is learned while the network trains
fresh, settings = build("cnn", digits.input_shape, digits.n_classes), {"lr": 5e-3}
la, online, *_ = marglik_training(
    fresh, loader, n_epochs=options.epochs, optimizer_kwargs=settings, marglik_frequency=10
)
report("online, KFAC of all data: the network", online.eval()(x_test).softmax(1))

# here: the same from blocks of the kernel, in a loop of one's own
torch.manual_seed(0)
model = build("cnn", digits.input_shape, digits.n_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
prior = GaussianPrior(model, "layerwise", precision=0.01)
ml = MarginalLikelihood(model, "classification", n_data=len(train), prior=prior)
learner = EvidenceLearner(ml, train, rows=200)
learner.attach(optimizer)
for _ in range(options.epochs):
    for x, y in loader:
        optimizer.zero_grad()
        ml.data_loss(model(x), y).backward()
        optimizer.step()
    learner.round()
report("online, blocks of 200 rows: the network", model.eval()(x_test).softmax(1))

figure, axis = plt.subplots(figsize=(7, 2.4), layout="constrained")
axis.barh(list(scores), list(scores.values()))
axis.set_xlabel("test log-likelihood")
figure.savefig(options.figure, dpi=120)
print(f"wrote {options.figure}")
