"""LoRA on a small GPT-2 with a precision for every adapter matrix, in a loop of accelerate.

pip install "ntk-marglik[transformers]" peft && python examples/lora.py
"""

import argparse

import matplotlib.pyplot as plt
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2ForSequenceClassification

from laplace_marglik import EvidenceLearner, GaussianPrior, MarginalLikelihood

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--figure", default="lora.png")
options = parser.parse_args()

WORDS, LENGTH, TOPICS = 90, 12, 3


def texts(n, seed):
    """Made-up news: half of the words of a text come from the thirty of its topic."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randint(0, TOPICS, (n, 1), generator=generator)
    own = torch.randint(1, 30, (n, LENGTH), generator=generator) + 30 * topic
    other = torch.randint(1, WORDS, (n, LENGTH), generator=generator)
    words = torch.where(torch.rand(n, LENGTH, generator=generator) < 0.5, own, other)
    entries = zip(words, topic.squeeze(1), strict=True)
    return [{"input_ids": w, "attention_mask": torch.ones_like(w), "labels": t} for w, t in entries]


torch.manual_seed(0)
shape = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 3, "n_head": 4}
special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
gpt2 = GPT2ForSequenceClassification(GPT2Config(**shape, **special, num_labels=TOPICS))
adapters = LoraConfig(
    task_type="SEQ_CLS", r=4, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True
)
model = get_peft_model(gpt2, adapters)
train, test = texts(300, 1), texts(300, 2)

# frozen weights are constants: the prior is one precision for each matrix of an adapter
prior = GaussianPrior(model, "layerwise", precision=1.0)
ml = MarginalLikelihood(model, "classification", n_data=len(train), prior=prior)
learner = EvidenceLearner(ml, train, rows=100, steps_per_block=10, total_rounds=options.epochs)

accelerator = Accelerator(cpu=True)
weights = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(weights, 5e-3, weight_decay=0.0)  # the learned one takes its place
model, optimizer, loader = accelerator.prepare(
    model, optimizer, DataLoader(train, batch_size=32, shuffle=True)
)
learner.attach(optimizer, decoupled=True)
for _ in range(options.epochs):
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(ml.data_loss(model(**batch), batch["labels"]))
        optimizer.step()
    learner.round()

model.eval()
with torch.no_grad():
    batch = next(iter(DataLoader(test, len(test))))
    right = (model(**batch).logits.argmax(1) == batch["labels"]).float().mean().item()
low, high = prior.precision.min().item(), prior.precision.max().item()
print(f"learned precisions of {len(prior.group_names)} matrices: {low:.1f} to {high:.1f}")
print(f"right on test texts: {100 * right:.1f} per cent")

names = [name.replace("base_model.model.", "") for name in prior.group_names]
figure, axis = plt.subplots(figsize=(7, 6.5), layout="constrained")
axis.barh([name.partition(".default")[0] for name in names], prior.precision.tolist())
axis.set(xlabel="learned prior precision (it began at 1)")
axis.tick_params(axis="y", labelsize=7)
figure.savefig(options.figure, dpi=120)
print(f"wrote {options.figure}")
