"""Pretrained networks of the transformers library with a new head, and what makes their inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.programs.finetune.checkpoints import Place, explained, write_sums
from ntkmarglik.programs.finetune.examples import Examples

Inputs = Tensor | dict[str, Tensor]
INSTALL = "pip install 'ntk-marglik[finetune]'"


class Classifier(nn.Module):
    """A transformers classifier of one argument, pixels [n, 3, h, w] or a mapping, to logits.

    Its parameters are `network.BACKBONE.*` and those of the head.
    """

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    @property
    def backbone(self) -> str:
        """The name of the pretrained part."""
        return f"network.{self.network.base_model_prefix}"

    def forward(self, x: Inputs) -> Tensor:
        if isinstance(x, Tensor):
            return self.network(pixel_values=x).logits
        mask = x["attention_mask"]
        # The mask over keys that attention adds: made here, since gradients per datum cannot pass
        # through its making.
        hidden = torch.zeros_like(mask, dtype=self._dtype).masked_fill(
            mask == 0, torch.finfo(self._dtype).min
        )
        return self.network(**{**x, "attention_mask": hidden[:, None, None, :]}).logits

    def save(self, folder: Path) -> None:
        """As a checkpoint that `load` reads."""
        with _quiet():
            self.network.save_pretrained(folder)  # type: ignore[operator]
        write_sums(folder)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.network.parameters()).dtype


def load(place: Place, n_classes: int, *, text: bool, seed: int) -> Classifier:
    """The network of a checkpoint, in training mode, with a head drawn from the seed."""
    transformers = library()
    kind = (
        transformers.AutoModelForSequenceClassification
        if text
        else transformers.AutoModelForImageClassification
    )
    with explained(place, "network"), torch.random.fork_rng(), _quiet():
        # the library draws weights that a checkpoint lacks from torch's own generator
        torch.manual_seed(seed)
        network = kind.from_pretrained(
            place.name,
            revision=place.revision or "main",
            use_safetensors=True,  # the other format is a program that makes the weights
            num_labels=n_classes,
            ignore_mismatched_sizes=True,
            attn_implementation="eager",
            dtype=torch.float32,
        )
    model = Classifier(network)
    _check_finite(model, place)
    _renew_head(model, torch.Generator().manual_seed(seed))
    return model.train()


def _check_finite(model: Classifier, place: Place) -> None:
    """Refuse a checkpoint whose weights are damaged."""
    for name, parameter in model.named_parameters():
        if name.startswith(f"{model.backbone}.") and not parameter.isfinite().all():
            raise NtkMarglikError(
                f"--checkpoint {place.name}: the weights {name} are not finite; the checkpoint is "
                "damaged, or was saved by a training that had diverged."
            )


def _renew_head(model: Classifier, generator: torch.Generator) -> None:
    """Forget the head's weights: a checkpoint may be of as many other classes."""
    scale = getattr(model.network.config, "initializer_range", 0.02)
    heads = [
        m for name, m in model.named_modules() if not f"{name}.".startswith(f"{model.backbone}.")
    ]
    for module in heads:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=scale, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class Preparation:
    """Makes the inputs of a network from examples, as the checkpoint's own files say."""

    def __init__(self, place: Place, *, text: bool, max_length: int):
        transformers = library()
        kind = transformers.AutoTokenizer if text else transformers.AutoImageProcessor
        part = "tokenizer" if text else "image processor"
        with explained(place, part), _quiet():
            self.processor = kind.from_pretrained(place.name, revision=place.revision or "main")
        self._text = text
        self._max_length = max_length

    def __call__(self, examples: Examples, index: np.ndarray) -> Inputs:
        """Pixels of the chosen examples, or their tokens padded to the longest text."""
        if not self._text:
            pictures = [examples.picture(i) for i in index]
            return self.processor(
                images=pictures, return_tensors="pt", input_data_format="channels_last"
            )["pixel_values"]
        longest = min(self._max_length, self.processor.model_max_length)
        texts = [examples.inputs[i] for i in index]
        return dict(
            self.processor(
                texts, padding=True, truncation=True, max_length=longest, return_tensors="pt"
            )
        )


def library() -> Any:
    """The transformers library, which only fine-tuning needs."""
    try:
        import transformers
    except ImportError as error:
        raise NtkMarglikError(f"Fine-tuning needs the transformers library: {INSTALL}") from error
    return transformers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's reports, of which the new head is the subject."""
    logging = library().logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


Prepare = Callable[[Examples, np.ndarray], Inputs]
