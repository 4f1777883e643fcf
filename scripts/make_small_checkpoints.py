"""Train small networks and save them as finetune.py reads pretrained ones: a few minutes on a CPU, no download.

python scripts/make_small_checkpoints.py convnext bert --data-root data --out checkpoints

convnext: a small ConvNeXt on the first five classes of CIFAR-10 (or on --dataset, --classes).
bert: a tiny BERT with its own word pieces, by masked words of AG News.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from torch import Tensor
from tqdm import trange

from ntkmarglik.finetune.examples import Examples, read, restricted
from ntkmarglik.finetune.inputs import Part, changed
from ntkmarglik.finetune.pretrained import Classifier, Preparation
from ntkmarglik.finetune.scores import evaluated
from ntkmarglik.schedule import cosine, set_rate

MASKED = 0.15  # share of word pieces to be guessed
LENGTH = 32  # of texts in word pieces
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def convnext(given: argparse.Namespace, folder: Path) -> None:
    """A ConvNeXt for pictures of 32 pixels, trained to classify some classes."""
    sides = {"shortest_edge": given.size}
    processor = transformers.ConvNextImageProcessorPil(do_resize=True, size=sides, crop_pct=1.0)
    config = transformers.ConvNextConfig(
        num_stages=2, depths=[1, 1], hidden_sizes=[24, 48], image_size=given.size,
        layer_scale_init_value=0.1, num_labels=len(given.classes),
    )  # fmt: skip
    processor.save_pretrained(folder)
    train, test, n_classes = read(given.dataset, given.data_root)
    prepare = Preparation(_saved_config(config, folder), text=False, max_length=0)
    parts = [Part(restricted(e, given.classes, n_classes), prepare, torch.device("cpu")) for e in (train, test)]
    model = Classifier(transformers.ConvNextForImageClassification(config))
    batches = torch.Generator().manual_seed(given.seed)

    def loss() -> Tensor:
        x, y = parts[0].batch(torch.randint(len(parts[0]), (64,), generator=batches))
        return torch.nn.functional.cross_entropy(model(changed(x, "crop", batches)), y)

    _train(model, loss, given.steps, rate=2e-3)
    print(f"{folder}: test accuracy {evaluated(model, parts[1])['accuracy']:.3f} on classes {given.classes}")
    model.save(folder)


def bert(given: argparse.Namespace, folder: Path) -> None:
    """A BERT of two layers and its word pieces, trained to guess masked ones."""
    train, _, _ = read("ag_news", given.data_root)
    tokenizer = _word_pieces(train, folder)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    network = transformers.BertForMaskedLM(config)
    prepare = Preparation(_saved_config(config, folder), text=True, max_length=LENGTH)
    part = Part(train, prepare, torch.device("cpu"))
    batches = torch.Generator().manual_seed(given.seed)
    losses: list[float] = []

    def loss() -> Tensor:
        x, _ = part.batch(torch.randint(len(part), (32,), generator=batches))
        assert isinstance(x, dict)
        tokens = x["input_ids"]
        hidden = (torch.rand(tokens.shape, generator=batches) < MASKED) & (tokens >= len(SPECIAL))
        wanted = torch.where(hidden, tokens, -100)  # the library's sign for what does not count
        shown = torch.where(hidden, torch.tensor(tokenizer.mask_token_id), tokens)
        found = network(**{**x, "input_ids": shown}, labels=wanted).loss
        losses.append(found.item())
        return found

    _train(network, loss, given.steps, rate=2e-3)
    print(f"{folder}: loss of masked words {sum(losses[-100:]) / len(losses[-100:]):.3f}")
    network.save_pretrained(folder)


def _word_pieces(train: Examples, folder: Path) -> Any:
    """A tokenizer with the commonest word pieces of the training texts."""
    from tokenizers import BertWordPieceTokenizer

    pieces = BertWordPieceTokenizer(lowercase=True)
    pieces.train_from_iterator(train.inputs, vocab_size=3000, special_tokens=SPECIAL, show_progress=False)
    tokenizer = transformers.BertTokenizerFast(tokenizer_object=pieces._tokenizer, model_max_length=LENGTH)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _saved_config(config: Any, folder: Path) -> str:
    """Save the configuration, which makes a checkpoint of the folder."""
    config.save_pretrained(folder)
    return str(folder)


def _train(model: torch.nn.Module, loss: Callable[[], Tensor], steps: int, *, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
    model.train()
    for step in trange(steps, disable=not sys.stderr.isatty()):
        set_rate(optimizer, cosine(step, steps, rate, 0.0))
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", choices=("convnext", "bert"))
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="where data files are")
    parser.add_argument("--out", type=Path, default=Path("checkpoints"), help="folder for the checkpoint folders")
    parser.add_argument("--dataset", default="cifar10", help="pictures for convnext")
    parser.add_argument("--classes", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="labels for convnext")
    parser.add_argument("--size", type=int, default=32, help="side of its pictures")
    parser.add_argument("--steps", type=int, default=2000, help="steps of training, with 64 pictures or 32 texts each")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in given.networks:
        torch.manual_seed(given.seed)
        label = f"convnext-{given.dataset}-{''.join(map(str, given.classes))}" if name == "convnext" else "bert-ag_news"
        folder = given.out / label
        folder.mkdir(parents=True, exist_ok=True)
        {"convnext": convnext, "bert": bert}[name](given, folder)


if __name__ == "__main__":
    main()
