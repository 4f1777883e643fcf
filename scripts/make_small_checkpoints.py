"""Train small classifiers that finetune.py reads as pretrained ones: minutes on a CPU, no download.

python scripts/make_small_checkpoints.py convnext bert --data-root data --out checkpoints

convnext: a small ConvNeXt on half of the classes of CIFAR-10. bert: a tiny BERT on half of the
classes of AG News, with word pieces of its own. What they have learned can be transferred to the
other classes. Beside each network are the statistics of some more training (SWAG) that
`finetune.py --prior ptyl` needs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn
from tqdm import trange

from laplace_marglik.schedule import cosine, set_rate
from ntkmarglik.machine.exits import exit_code
from ntkmarglik.programs.finetune.checkpoints import Place
from ntkmarglik.programs.finetune.examples import Examples, is_text, read, restricted
from ntkmarglik.programs.finetune.inputs import Part, changed
from ntkmarglik.programs.finetune.pretrained import Classifier, Preparation
from ntkmarglik.programs.finetune.scores import evaluated
from ntkmarglik.programs.finetune.swag import RANK, Collection

SIDE = 32  # of pictures, in pixels
LENGTH = 32  # of texts, in word pieces
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
RATE = 2e-3
BATCH = 64
# of the steps after the training, along which statistics are collected; the rate stays
SWAG_RATE = 0.01
SWAG_EVERY = 20


def convnext(train: Examples, n_classes: int, folder: Path) -> nn.Module:
    """A ConvNeXt of two stages; its image processor goes to the folder."""
    processor = transformers.ConvNextImageProcessorPil(
        do_resize=True, size={"shortest_edge": SIDE}, crop_pct=1.0
    )
    processor.save_pretrained(folder)
    config = transformers.ConvNextConfig(
        num_stages=2,
        depths=[1, 1],
        hidden_sizes=[24, 48],
        image_size=SIDE,
        layer_scale_init_value=0.1,
        num_labels=n_classes,
    )
    return transformers.ConvNextForImageClassification(config)


def bert(train: Examples, n_classes: int, folder: Path) -> nn.Module:
    """A BERT of two layers; a tokenizer of the commonest word pieces goes to the folder."""
    from tokenizers import BertWordPieceTokenizer

    pieces = BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(
        train.inputs, vocab_size=3000, special_tokens=SPECIAL, show_progress=False
    )
    pieces.save_model(str(folder))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=LENGTH)
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        num_labels=n_classes,
        attn_implementation="eager",
    )
    return transformers.BertForSequenceClassification(config)


NETWORKS: dict[str, tuple[Callable[[Examples, int, Path], nn.Module], str, list[int]]] = {
    "convnext": (convnext, "cifar10", [0, 1, 2, 3, 4]),
    "bert": (bert, "ag_news", [0, 2]),
}


def make(name: str, given: argparse.Namespace) -> None:
    """Train one network, say how good it is, and save it."""
    build, dataset, classes = NETWORKS[name]
    folder = given.out / f"{name}-{dataset}-{''.join(map(str, classes))}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(given.seed)
    *splits, n_classes = read(dataset, given.data_root)
    train, test = (restricted(split, classes, n_classes) for split in splits)
    model = Classifier(build(train, len(classes), folder))
    model.save(folder)  # the configuration makes a checkpoint of the folder
    prepare = Preparation(Place(str(folder)), text=is_text(dataset), max_length=LENGTH)
    parts = [Part.of(split, prepare, torch.device("cpu")) for split in (train, test)]
    batches = torch.Generator().manual_seed(given.seed)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    model.train()
    for step in trange(given.steps, desc=name, disable=not sys.stderr.isatty()):
        set_rate(optimizer, cosine(step, given.steps, RATE, 0.0))
        advance(model, optimizer, parts[0], batches)
    model.save(folder)
    print(f"{folder}: test accuracy {evaluated(model, parts[1])['accuracy']:.3f}")
    collection = along(model, parts[0], batches, given.swag_steps)
    collection.statistics().save(folder)
    print(
        f"{folder}: {evaluated(model, parts[1])['accuracy']:.3f} after the steps of the statistics"
    )


def advance(
    model: Classifier, optimizer: torch.optim.Optimizer, part: Part, batches: torch.Generator
) -> None:
    """One step of training on a random batch."""
    x, y = part.batch(torch.randint(len(part), (BATCH,), generator=batches))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(changed(x, "crop", batches)), y).backward()
    optimizer.step()


def along(model: Classifier, part: Part, batches: torch.Generator, steps: int) -> Collection:
    """Train on with SGD at a constant rate, and take the weights every SWAG_EVERY steps."""
    optimizer = torch.optim.SGD(model.parameters(), SWAG_RATE, momentum=0.9)
    collection = Collection(model)
    model.train()
    for step in range(steps):
        advance(model, optimizer, part, batches)
        if (step + 1) % SWAG_EVERY == 0:
            collection.add()
    return collection


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="+", choices=tuple(NETWORKS))
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="where data files are")
    parser.add_argument(
        "--out", type=Path, default=Path("checkpoints"), help="folder for the checkpoint folders"
    )
    parser.add_argument(
        "--steps", type=int, default=1200, help="steps of training, with 64 examples each"
    )
    parser.add_argument(
        "--swag-steps", type=int, default=400, help="more steps, for the statistics of --prior ptyl"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    least = (RANK + 1) * SWAG_EVERY
    if given.swag_steps < least:
        parser.error(f"--swag-steps must be at least {least}, for {RANK} deviations")
    for name in given.networks:
        make(name, given)


if __name__ == "__main__":
    sys.exit(exit_code(main))
