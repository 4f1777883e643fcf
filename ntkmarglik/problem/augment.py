"""Learnable affine augmentation: images moved, turned, scaled and sheared within learned ranges."""

import contextlib
import difflib
import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ntkmarglik.errors import NtkMarglikError

RANGES = ("tx", "ty", "rotation", "sx", "sy", "shear")
ROTATION = RANGES.index("rotation")


def generators() -> Tensor:
    """The generators [6, 3, 3] of the affine group, as in RANGES, on pixels in [-1, 1]."""
    g = torch.zeros(6, 3, 3)
    g[0, 0, 2] = 1
    g[1, 1, 2] = 1
    g[2, 0, 1], g[2, 1, 0] = -1, 1
    g[3, 0, 0] = 1
    g[4, 1, 1] = 1
    g[5, 0, 1] = g[5, 1, 0] = 1
    return g


def stacked_grid(theta: Tensor, h: int, w: int) -> Tensor:
    """Sampling grids of theta [n, A, 2, 3], an image's A pictures in one tall one [n, A * h, w, 2].

    With a tall grid `grid_sample` reads each image A times and never copies it; one matrix product
    for each coordinate is several times faster than `affine_grid`, which would take most of the
    time of an augmentation.
    """
    n, samples = theta.shape[:2]
    axes = (torch.linspace(-1, 1, size, device=theta.device, dtype=theta.dtype) for size in (h, w))
    v, u = torch.meshgrid(*axes, indexing="ij")
    pixels = torch.stack([u, v, torch.ones_like(u)]).flatten(1)
    planes = theta.transpose(1, 2).reshape(-1, 3) @ pixels
    return planes.view(n, 2, samples * h, w).permute(0, 2, 3, 1)


class AffineAugmentation(nn.Module):
    """Draws A random affine images of each input; the six ranges `eta` are learned.

    T = exp(sum_k eps_k eta_k G_k),  eps_k ~ U[-1, 1] for each image and sample; its top two rows
    are the sampling grid. Immer et al. (2022), Invariance Learning in Deep Neural Networks with
    Differentiable Laplace Approximations.

    Exactly 0 is no augmentation, but a bad start: the gradient there has mean 0 over eps, since eta
    and -eta are the same law, and bilinear sampling has a kink at whole pixels. Hence 0.05: less
    than a pixel on 28x28.

    The draws come from torch's global generator: the evidence visits an input twice, and seeds and
    forks that generator around each visit, for this module as for any other a user may pass.

    Args:
        samples: copies A of each input.
        flip: also mirror left and right with probability 1/2.
        init: where the learned ranges start (the others stay 0), or all six values.
        learn: names of the ranges that are learned.
    """

    eta: nn.Parameter
    learned: Tensor
    basis: Tensor

    def __init__(
        self,
        samples: int,
        *,
        flip: bool = False,
        init: float | Sequence[float] = 0.05,
        learn: Sequence[str] = RANGES,
    ) -> None:
        super().__init__()
        if samples < 1:
            raise NtkMarglikError(f"samples must be at least 1, but is {samples}.")
        for name in learn:
            if name not in RANGES:
                close = difflib.get_close_matches(name, RANGES, n=1, cutoff=0.4)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise NtkMarglikError(
                    f"learn must hold names out of {', '.join(RANGES)}, but has {name!r}.{hint}"
                )
        learned = torch.tensor([float(name in learn) for name in RANGES])
        start = (
            learned * init
            if isinstance(init, float | int)
            else torch.tensor([float(v) for v in init])
        )
        if start.shape != learned.shape:
            raise NtkMarglikError(
                f"init must be one number or six ({', '.join(RANGES)}), but has {len(start)}."
            )
        self.samples = samples
        self.flip = flip
        self._share: tuple[int, int] | None = None
        self.eta = nn.Parameter(start)
        self.register_buffer("learned", learned, persistent=False)
        self.register_buffer("basis", generators(), persistent=False)
        self.project_()

    def forward(self, x: Tensor) -> Tensor:
        """Random images of x [n, c, h, w] as [n, A, c, h, w], differentiable in `eta`."""
        n, c, h, w = x.shape
        # Pixel coordinates in half precision would miss by a pixel: no autocast, at least the
        # precision of eta.
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.promote_types(x.dtype, self.eta.dtype)
            grid = stacked_grid(self.matrices(n, dtype).view(n, self.samples, 2, 3), h, w)
            stacked = F.grid_sample(x.to(dtype), grid, align_corners=True)
        return stacked.view(n, c, self.samples, h, w).transpose(1, 2).to(x.dtype)

    def matrices(self, n: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random sampling matrices [n * A, 2, 3]."""
        eta = self.eta.to(dtype or self.eta.dtype)
        # Ranges that are not learned keep their value and get no gradient.
        eta = torch.where(self.learned.bool(), eta, eta.detach())
        algebra = (self.draws(n, eta) * eta) @ self.basis.to(eta.dtype).flatten(1)
        theta = torch.linalg.matrix_exp(algebra.view(-1, 3, 3))[:, :2]
        if self.flip:
            total, own = self._drawn(n)
            side = 2.0 * torch.randint(2, (total * self.samples, 1), device=eta.device)[own] - 1
            mirror = torch.cat([side, torch.ones_like(side)], 1).to(eta.dtype)
            theta = theta * mirror.unsqueeze(2)
        return theta

    def draws(self, n: int, like: Tensor) -> Tensor:
        """The random directions eps [n * A, 6] of n images."""
        total, own = self._drawn(n)
        return (
            2
            * torch.rand(total * self.samples, len(RANGES), device=like.device, dtype=like.dtype)[
                own
            ]
            - 1
        )

    def _drawn(self, n: int) -> tuple[int, slice]:
        """For how many images to draw, and which of the draws are those of the n given."""
        start, total = self._share or (0, n)
        return total, slice(start * self.samples, (start + n) * self.samples)

    @contextlib.contextmanager
    def sharing(self, start: int, total: int) -> Iterator[None]:
        """Context in which images from `start` on, of `total`, are moved as in the whole batch."""
        self._share = start, total
        try:
            yield
        finally:
            self._share = None

    @torch.no_grad()
    def project_(self) -> None:
        """Bring the rotation range back to [-pi, pi], all angles; call it after every step.

        A clamp in `forward` would stop the gradient outside, and with it the way back.
        """
        self.eta[ROTATION].clamp_(-math.pi, math.pi)

    def ranges(self) -> dict[str, float]:
        """The learned ranges by name; their signs have no meaning and are dropped."""
        return dict(zip(RANGES, self.eta.detach().abs().tolist(), strict=True))
