"""A learned invariance: how far digits that lie at any angle may be turned.

python examples/learned_augmentation.py
"""

import argparse
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from laplace_marglik import EvidenceLearner, GaussianPrior, MarginalLikelihood
from ntkmarglik.problem.augment import AffineAugmentation
from ntkmarglik.problem.data import load
from ntkmarglik.problem.models import build

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--figure", default="learned_augmentation.png")
options = parser.parse_args()

torch.manual_seed(0)
data = load("digits_r180", "data")  # each image turned by its own angle
model = build("mininet", data.input_shape, data.n_classes)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

augment = AffineAugmentation(samples=8, learn=["rotation"])  # starts at 0.05 rad
prior = GaussianPrior(model, "layerwise", precision=1.0)
ml = MarginalLikelihood(
    model, "classification", n_data=data.n_data, prior=prior, augment=augment, outputs=1
)
learner = EvidenceLearner(
    ml,
    (data.x_train, data.y_train),
    rows=100,
    steps=8,
    augment_steps=8,
    lr_augment=0.1,
    burn_in=5,
    total_rounds=options.epochs,
)
learner.attach(optimizer)

angles = []
for _ in range(options.epochs):
    model.train()
    for batch in torch.randperm(data.n_data).split(128):
        optimizer.zero_grad()
        # outputs are averaged over the augmented copies, in training as in predictions
        ml.data_loss(ml.outputs_of(data.x_train[batch]), data.y_train[batch]).backward()
        optimizer.step()
    learner.round()
    angles.append(math.degrees(augment.ranges()["rotation"]))

model.eval()
with torch.no_grad():
    loss = F.cross_entropy(ml.outputs_of(data.x_test, seed=0), data.y_test).item()
    copies = augment(data.x_test[:3])
print(f"learned rotation: up to {angles[-1]:.0f} degrees (it began at 3)")
print(f"test log-likelihood: {-loss:.4f}")

figure = plt.figure(figsize=(8, 3), layout="constrained")
left, right = figure.subfigures(1, 2, width_ratios=[1, 1.3])
axis = left.subplots()
axis.plot(angles)
axis.set(xlabel="epoch", ylabel="learned rotation (degrees)", ylim=(0, 185))
images = right.subplots(3, 7)
for row, image, own in zip(images, data.x_test[:3], copies, strict=True):
    for cell, picture in zip(row, [image, *own[:6]], strict=True):
        cell.imshow(picture[0], cmap="gray_r")
        cell.set_axis_off()
images[0, 0].set_title("digit", fontsize=8)
images[0, 3].set_title("as the network sees it", fontsize=8)
figure.savefig(options.figure, dpi=120)
print(f"wrote {options.figure}")
