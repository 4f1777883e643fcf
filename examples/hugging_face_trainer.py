"""The Trainer of Hugging Face learns the weight decay of every part of a small ViT on digits.

pip install "ntk-marglik[transformers]" && python examples/hugging_face_trainer.py
"""

import argparse
import tempfile

import matplotlib.pyplot as plt
import torch
from transformers import (
    PrinterCallback,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from laplace_marglik import EvidenceLearner, GaussianPrior, MarginalLikelihood
from laplace_marglik.integrations.transformers import EvidenceCallback
from ntkmarglik.problem.data import load

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--figure", default="hugging_face_trainer.png")
options = parser.parse_args()

torch.manual_seed(0)
digits = load("digits", "data")
train, test = (
    [{"pixel_values": image, "labels": label} for image, label in zip(x, y, strict=True)]
    for x, y in ((digits.x_train, digits.y_train), (digits.x_test, digits.y_test))
)
image = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
# weights of 0.02, the default of transformers, would look as if they were not needed
start = {"intermediate_size": 64, "initializer_range": 0.15}
model = ViTForImageClassification(ViTConfig(**image, **size, **start))

# parts of the network that share a precision; the first pattern that fits decides
parts = {"*embeddings*": "embeddings", "*attention*": "attention", "*norm*": "norms"}
prior = GaussianPrior(model, {**parts, "classifier*": "head", "*": "mlp"}, precision=0.1)
ml = MarginalLikelihood(model, "classification", n_data=len(train), prior=prior)
# the first epochs are for the weights alone: a prior learned before them would forbid them to move
learner = EvidenceLearner(ml, train, rows=100, steps_per_block=10, burn_in=10)

with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        output_dir=folder,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=64,
        learning_rate=3e-3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    callback = EvidenceCallback(learner)
    trainer = Trainer(model, settings, train_dataset=train, callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    scores = trainer.evaluate(test)

rounds = [entry for entry in trainer.state.log_history if "evidence/total" in entry]
print(f"test log-likelihood: {-scores['eval_loss']:.4f}")
for name, precision in zip(prior.group_names, prior.precision.tolist(), strict=True):
    print(f"  precision of {name:10s} {precision:8.3f} (it began at 0.1)")

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
epochs = [entry["epoch"] for entry in rounds]
left.plot(epochs, [entry["evidence/total"] for entry in rounds])
left.set(xlabel="epoch", ylabel="evidence per datum")
for name in prior.group_names:
    right.semilogy(epochs, [entry[f"precision/{name}"] for entry in rounds], label=name)
right.set(xlabel="epoch", ylabel="prior precision")
right.legend(fontsize="small")
figure.savefig(options.figure, dpi=120)
print(f"wrote {options.figure}")
