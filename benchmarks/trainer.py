"""What the callback adds to an epoch of Hugging Face's Trainer: `python benchmarks/trainer.py`.

A small BERT on made-up texts is trained with and without the callback in turn; CPU time of an
epoch with it, divided by that of one without.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from typing import Any

import measure
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from laplace_marglik import EvidenceLearner, GaussianPrior, MarginalLikelihood
from laplace_marglik.integrations.transformers import EvidenceCallback
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.machine.files import target_file

LENGTH, WORDS, TOPICS = 32, 1000, 4
# of the learner, beside its defaults
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults (one block of 200 rows a round)": {},
    "one block of 500 rows a round": {"rows": 500},
    "ten blocks of 200 rows a round": {"steps_per_block": 1},
}


def texts(n: int) -> list[dict[str, torch.Tensor]]:
    """Made-up texts: half of the words are of the text's topic."""
    generator = torch.Generator().manual_seed(0)
    topic = torch.randint(0, TOPICS, (n, 1), generator=generator)
    size = WORDS // TOPICS
    own = torch.randint(0, size, (n, LENGTH), generator=generator) + size * topic
    other = torch.randint(0, WORDS, (n, LENGTH), generator=generator)
    words = torch.where(torch.rand(n, LENGTH, generator=generator) < 0.5, own, other)
    entries = zip(words, topic.squeeze(1), strict=True)
    return [{"input_ids": w, "attention_mask": torch.ones_like(w), "labels": t} for w, t in entries]


def epoch_seconds(n: int, width: int, epochs: int, settings: dict[str, Any] | None) -> float:
    """CPU time of an epoch; settings: of the learner, None for no callback."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH,
        num_labels=TOPICS,
    )
    model = BertForSequenceClassification(config)
    data = texts(n)
    callbacks = []
    if settings is not None:
        prior = GaussianPrior(model, "layerwise", 1.0)
        ml = MarginalLikelihood(model, "classification", n_data=n, prior=prior)
        rows = min(settings.get("rows", 200), n // 2)
        learner = EvidenceLearner(ml, data, **{**settings, "rows": rows})
        callbacks.append(EvidenceCallback(learner))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        start = time.process_time()
        trainer.train()
        return (time.process_time() - start) / epochs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a few data, to see that it runs")
    parser.add_argument("--csv", type=target_file, help="also write the table here")
    arguments = parser.parse_args()
    n, width, epochs, repeats = (64, 8, 1, 1) if arguments.small else (5000, 64, 2, 3)
    rows = []
    print(f"{'setting':<42} {'epoch':>8} {'with it':>8} {'ratio':>6}")
    for name, settings in SETTINGS.items():
        plain, learned = [], []
        for _ in range(repeats):
            plain.append(epoch_seconds(n, width, epochs, None))
            learned.append(epoch_seconds(n, width, epochs, settings))
        ratio = min(learned) / min(plain)
        print(f"{name:<42} {min(plain):8.2f} {min(learned):8.2f} {ratio:6.2f}", flush=True)
        rows.append({"setting": name, "n_data": n, "epoch_seconds": min(plain), "ratio": ratio})
    if arguments.csv:
        measure.write_csv(arguments.csv, rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
