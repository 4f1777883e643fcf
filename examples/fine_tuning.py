"""Fine-tuning with the data-emphasised ELBO: one fit finds the pull towards pretrained weights.

python examples/fine_tuning.py
"""

import argparse
import copy

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from laplace_marglik import DataEmphasizedELBO, GaussianPrior
from ntkmarglik.problem.data import load
from ntkmarglik.problem.models import build

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--figure", default="fine_tuning.png")
options = parser.parse_args()

torch.manual_seed(0)
digits = load("digits", "data")


def scanned(x):
    """The same images from a poor scanner: half the contrast, and noise."""
    return 0.5 * x + 0.5 * x.std() * torch.randn_like(x)


x_new, y_new = scanned(digits.x_train[:60]), digits.y_train[:60]  # no more than these
x_test, y_test = scanned(digits.x_test), digits.y_test


def fit(parameters, loss, x, y, epochs):
    """Adam on shuffled batches of 30."""
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(30):
            optimizer.zero_grad()
            loss(x[batch], y[batch]).backward()
            optimizer.step()


def report(name, model):
    """Accuracy and log-likelihood on images of the poor scanner."""
    f = model.eval()(x_test).detach()
    right = 100 * (f.argmax(1) == y_test).float().mean().item()
    results[name] = -F.cross_entropy(f, y_test).item()
    print(f"{name:26s} {right:.1f} % right, log-likelihood {results[name]:.3f}")


results = {}
pretrained = build("cnn", digits.input_shape, digits.n_classes)
good = (digits.x_train, digits.y_train)
fit(pretrained.parameters(), lambda x, y: F.cross_entropy(pretrained(x), y), *good, epochs=5)
report("pretrained alone", pretrained)

free = copy.deepcopy(pretrained)
fit(free.parameters(), lambda x, y: F.cross_entropy(free(x), y), x_new, y_new, options.epochs)
report("fine-tuned without a prior", free)

for name, mean in (("prior around zero", 0.0), ("prior around pretrained", "current")):
    model = copy.deepcopy(pretrained)
    prior = GaussianPrior(model, {"11.*": "head", "*": "backbone"}, mean=mean)
    elbo = DataEmphasizedELBO(
        model, "classification", n_data=len(x_new), prior=prior, kappa="auto", sigma=0.01
    )
    fit([*model.parameters(), *elbo.parameters()], elbo, x_new, y_new, options.epochs)
    report(name, model)
    variances = {group: round(v.item(), 5) for group, v in elbo.prior_variance().items()}
    bound = elbo.evaluate([(x_new, y_new)]).de_elbo.total.item() / len(x_new)
    print(f"  learned variances {variances}, bound per datum {bound:.0f}")

figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
axis.barh(list(results), list(results.values()))
axis.set_xlabel("test log-likelihood")
axis.invert_yaxis()
figure.savefig(options.figure, dpi=120)
print(f"wrote {options.figure}")
