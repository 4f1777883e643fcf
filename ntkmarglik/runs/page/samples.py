"""Pictures of what an augmentation does, at the start of a run and at its end."""

from __future__ import annotations

import base64
import io

import torch
from PIL import Image
from torch import Tensor

from ntkmarglik.problem.augment import AffineAugmentation
from ntkmarglik.runs.report import pictures

SHOWN = 11  # copies of each example
EXAMPLES = 2
ENLARGED = 64  # pixels at least of each picture


def samples(start: list[float], end: list[float], x: Tensor, *, flip: bool) -> dict[str, str]:
    """The same draws from the first and the last ranges, as pictures within addresses.

    x [n, c, h, w]: training inputs, of which the first are shown.
    """
    return {
        "at the start": _address(start, x[:EXAMPLES], flip),
        "at the end": _address(end, x[:EXAMPLES], flip),
    }


def _address(ranges: list[float], examples: Tensor, flip: bool) -> str:
    augment = AffineAugmentation(1, flip=flip, init=ranges).to(examples.device, examples.dtype)
    sheets = [pictures(augment, example, SHOWN, (SHOWN + 1) // 2)[0] for example in examples]
    sheet = (torch.cat(sheets) * 255).round().to(torch.uint8)
    picture = Image.fromarray(sheet.numpy())
    factor = max(1, ENLARGED // examples.shape[2])
    size = (picture.width * factor, picture.height * factor)
    file = io.BytesIO()
    enlarged = picture.resize(size, Image.Resampling.NEAREST)
    enlarged.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
