"""What batches come as: pairs (inputs, targets), or mappings with the targets among the inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from laplace_marglik.errors import MarglikError

LABELS = ("labels", "label")  # names of targets in a mapping, where none is given


def pair_of(batch: Any, labels: str | None = None) -> tuple[Any, Any]:
    """Inputs and targets of a batch.

    Args:
        batch: a pair, or a mapping with the targets inside.
        labels: name of the targets in a mapping; None for "labels" or "label".
    """
    if isinstance(batch, Mapping):
        names = LABELS if labels is None else (labels,)
        name = next((name for name in names if name in batch), None)
        if name is not None:
            return {key: value for key, value in batch.items() if key != name}, batch[name]
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise MarglikError(
        "every batch must be a pair (inputs, targets) or a mapping with an entry "
        f"{labels or LABELS[0]!r}, got a {type(batch).__name__} {_contents(batch)}; make such "
        "batches in the loader's collate_fn, several inputs as a mapping ({'a': a, 'b': b}, y), "
        "or name the targets with labels="
    )


def pairs(loader: Iterable[Any], labels: str | None = None) -> Iterator[tuple[Any, Any]]:
    """The batches (inputs, targets) of a loader.

    Args:
        loader: gives pairs, or mappings with the targets inside.
        labels: name of the targets in a mapping; None for "labels" or "label".
    """
    for batch in loader:
        yield pair_of(batch, labels)


def _contents(batch: Any) -> str:
    """What is in a batch, for an error message."""
    if isinstance(batch, Mapping):
        return f"with the keys {list(batch)}"
    if isinstance(batch, (tuple, list)):
        return f"of {len(batch)} entries"
    return ""
