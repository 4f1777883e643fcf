"""Lightning learns the noise and the weight decay of a regression on scikit-learn's diabetes data.

pip install "ntk-marglik[lightning]" && python examples/lightning_trainer.py
"""

import argparse

import lightning
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_marglik import EvidenceLearner, Gaussian, GaussianPrior, MarginalLikelihood
from laplace_marglik.integrations.lightning import EvidenceCallback

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=150)
parser.add_argument("--figure", default="lightning_trainer.png")
options = parser.parse_args()

torch.manual_seed(0)
x, y = (torch.as_tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)
order = torch.randperm(len(x))
train, test = order[:350], order[350:]

network = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
likelihood = Gaussian(sigma=1.0)  # learned, too
prior = GaussianPrior(network, "layerwise", precision=1.0)
ml = MarginalLikelihood(network, likelihood, n_data=len(train), prior=prior)
# all data at once in every step: they are few
learner = EvidenceLearner(ml, (x[train], y[train]), rows=None, steps=5, burn_in=10)


class Regression(lightning.LightningModule):
    """An ordinary module; its loss is that of the data alone, at the noise learned so far."""

    def __init__(self):
        super().__init__()
        self.network = network
        self.noise = []

    def training_step(self, batch, _):
        return ml.data_loss(self.network(batch[0]), batch[1])

    def on_train_epoch_end(self):
        self.noise.append(likelihood.sigma.item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


module = Regression()
trainer = lightning.Trainer(
    max_epochs=options.epochs,
    callbacks=[EvidenceCallback(learner)],
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
loader = DataLoader(TensorDataset(x[train], y[train]), 50, shuffle=True)
trainer.fit(module, loader)

with torch.no_grad():
    error = (network(x[test]) - y[test]).square().mean().sqrt().item()
print(f"learned noise {likelihood.sigma.item():.3f}, error on test data {error:.3f}")
print("learned precisions", {n: round(p.item(), 2) for n, p in prior.precisions().items()})

figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
axis.plot(module.noise, label="learned noise")
axis.axhline(error, color="C3", linestyle="--", label="error on test data")
axis.set(xlabel="epoch", ylabel="standard deviation", ylim=(0, None))
axis.legend()
figure.savefig(options.figure, dpi=120)
print(f"wrote {options.figure}")
