"""What a likelihood is, and what follows from its `log_prob` alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from asdl_marglik import eigen_root, psd_sqrt
from laplace_marglik.checks import LARGEST_LOG, positive_number
from laplace_marglik.errors import MarglikError

# roots of the likelihood's curvature Lambda; paper: of its sub-block at the chosen outputs
Root = Literal["paper", "fisher", "symmetric", "eigen"]
# rows that are gradients of log-likelihoods instead, at the targets or at targets that are drawn
GradientRoot = Literal["empirical", "sampled"]


class Likelihood(nn.Module):
    """p(y | f) for outputs f [n, ...]; a subclass needs only `log_prob`.

    The curvature Lambda = -d^2 log p / df^2 is `curvature_scale() * hessian(f, y)`: global factors
    (temperature, noise) stand apart, so that learning them needs no new pass over the data.
    Outputs are counted in memory order, C of them in all, whatever their shape.

    Args:
        temperature: tau, by which log-probabilities are divided.
        learn_temperature: whether `log_temperature` requires grad.
    """

    diagonal = False  # whether Lambda is diagonal: then single outputs are true root rows
    # whether `log_prob` is a function of f and y alone, which no parameter can change
    constant_log_prob = False
    discrete = False  # whether targets are discrete: then log p <= 0
    # parameters that enter only through `curvature_scale`
    scale_parameters: tuple[str, ...] = ("log_temperature",)
    # parameters that enter products of slopes only through `slope_scale`
    slope_scale_parameters: tuple[str, ...] = ("log_temperature",)
    draws_targets = False  # whether it has `n_uniforms` and `drawn_slope`

    def __init__(self, temperature: float = 1.0, *, learn_temperature: bool = False):
        super().__init__()
        positive_number("temperature", temperature)
        log_temperature = torch.tensor(math.log(temperature), dtype=torch.float64)
        self.log_temperature = nn.Parameter(log_temperature, requires_grad=learn_temperature)

    def extra_repr(self) -> str:
        return scale_text("temperature", self.log_temperature)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y_i | f_i) of each datum [n], before the temperature.

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
        """
        raise TypeError(f"{type(self).__name__} must define log_prob(f, y) -> [n]")

    def tempered_log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y_i | f_i) / tau of each datum [n], in the dtype of `log_prob`.

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
        """
        log_prob = self.log_prob(f, y)
        return log_prob * self.inverse_temperature.to(log_prob.dtype)

    @property
    def inverse_temperature(self) -> Tensor:
        """1 / tau in float64, by which log-probabilities are multiplied."""
        return torch.exp(-self.log_temperature.double())

    @property
    def learns_noise(self) -> bool:
        """Whether training may shrink the noise to nothing, so that log p has no upper limit."""
        return False

    def predict(self, f: Tensor) -> Tensor:
        """The mean prediction [n, ...].

        Args:
            f: outputs [n, ...].
        """
        return f

    def predict_probit(self, f: Tensor, variance: Tensor) -> Tensor:
        """The mean prediction for outputs with independent normal errors (MacKay 1992).

        Args:
            f: mean of the outputs [n, ...].
            variance: of each output, shaped as f.
        """
        raise MarglikError(
            "the probit approximation is for class probabilities, not for "
            f"{type(self).__name__}; use kind='mc'"
        )

    def curvature_scale(self) -> Tensor:
        """The factor between `hessian` and the curvature of the tempered likelihood."""
        return self.inverse_temperature

    def check_scales(self) -> None:
        """Refuse temperatures and noises whose exponential overflows."""
        for name in self.scale_parameters:
            value = getattr(self, name).item()
            if not abs(value) <= LARGEST_LOG:
                raise MarglikError(f"{name} of the likelihood is {value:g}, which overflows")

    def root_parameters(self) -> list[nn.Parameter]:
        """Learnable parameters that shape the Hessian itself."""
        return self._learnable_besides(self.scale_parameters)

    def slope_parameters(self) -> list[nn.Parameter]:
        """Learnable parameters that shape the slope itself."""
        return self._learnable_besides(self.slope_scale_parameters)

    def _learnable_besides(self, names: tuple[str, ...]) -> list[nn.Parameter]:
        named = self.named_parameters()
        return [p for name, p in named if p.requires_grad and name not in names]

    @contextmanager
    def constant(self) -> Iterator[None]:
        """The likelihood's parameters as constants inside the context."""
        learnable = [p for p in self.parameters() if p.requires_grad]
        for p in learnable:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in learnable:
                p.requires_grad_(True)

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        """-d^2 log p / df^2 [n, C, C], `log_prob` differentiated twice; it may be indefinite.

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
        """
        with torch.enable_grad():
            flat = f.flatten(1)
            if not flat.requires_grad:
                flat = flat.detach().requires_grad_()
            log_prob = self.log_prob(flat.reshape(f.shape), y)
            if log_prob.shape != f.shape[:1]:
                raise MarglikError(
                    f"log_prob must return one value per datum [{len(f)}], got "
                    f"{tuple(log_prob.shape)}"
                )
            (slope,) = torch.autograd.grad(log_prob.sum(), flat, create_graph=True)
            columns = [_slope_of_column(slope, c, flat) for c in range(flat.shape[1])]
        return -torch.stack(columns, 1)

    def slope(self, f: Tensor, y: Tensor) -> Tensor:
        """d log p / df of each datum, shaped as f, before the scale: `log_prob` differentiated.

        The outer product of the log-likelihood's gradient, which is counted 1 / tau times, is
        `slope_scale() * slope slope^T`.

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
        """
        with torch.enable_grad():
            if not f.requires_grad:
                f = f.detach().requires_grad_()
            log_prob = self.log_prob(f, y)
            (slope,) = torch.autograd.grad(log_prob.sum(), f, create_graph=True)
        return slope

    def slope_scale(self) -> Tensor:
        """The factor between products of slopes and those of the log-likelihood's gradients."""
        return self.inverse_temperature

    def n_uniforms(self, shape: torch.Size) -> int:
        """Random numbers that the targets of one datum are drawn from.

        Args:
            shape: of the outputs of one datum.
        """
        raise TypeError(f"{type(self).__name__} draws no targets")

    def drawn_slope(self, f: Tensor, y: Tensor, uniforms: Tensor) -> Tensor:
        """The slope at targets drawn from the model; on average, slope slope^T = Hessian.

        Derivatives are for fixed random numbers: classes and counts that were drawn are constants.

        Args:
            f: outputs [n, ...].
            y: targets, of which only how often they count is used.
            uniforms: numbers between 0 and 1 [n, n_uniforms].
        """
        raise TypeError(f"{type(self).__name__} draws no targets")

    def root(self, f: Tensor, y: Tensor, kind: Root, columns: Tensor) -> Tensor:
        """Columns [n, C, K] of a root U of the Hessian's positive semi-definite part.

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
            kind: which of the roots with U U^T = Lambda.
            columns: numbers of the columns of each datum [n, K].
        """
        hessian = self.hessian(f, y)
        root = eigen_root(hessian) if kind == "eigen" else psd_sqrt(hessian)
        return _columns_of(root, columns)

    def block_root(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        """A root [n, K, K] of the Hessian's sub-block at some outputs; None for the identity.

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
            columns: numbers of the outputs of each datum [n, K].
        """
        hessian = self.hessian(f, y)
        chosen_rows = hessian.gather(1, columns.unsqueeze(2).expand(-1, -1, hessian.shape[2]))
        return psd_sqrt(_columns_of(chosen_rows, columns))

    def root_product(self, f: Tensor, y: Tensor, xi: Tensor) -> Tensor:
        """U xi [k, n, ...]: noise of covariance U U^T if xi is standard normal.

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
            xi: k vectors, each shaped as the outputs [k, n, ...].
        """
        columns = torch.arange(f[0].numel(), device=f.device).expand(len(f), -1)
        root = self.root(f, y, "symmetric", columns)
        product = torch.einsum("ncd,knd->knc", root, xi.flatten(2))
        return product.reshape(xi.shape)

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        """U U^T v [k, n, ...].

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
            v: k vectors, each shaped as the outputs [k, n, ...].
        """
        return self.root_product(f, y, self.root_product(f, y, v))

    def contrasts(self, shape: torch.Size) -> Tensor | None:
        """R < C directions [R, C] of the outputs that span all curvature; None if there are C.

        Args:
            shape: of the outputs of one datum.
        """
        return None

    def contrast_root(self, f: Tensor, y: Tensor) -> Tensor:
        """A root [n, R, R] of the Hessian in the coordinates of `contrasts`.

        Args:
            f: outputs [n, ...].
            y: targets, one per datum.
        """
        raise TypeError(f"{type(self).__name__} names no contrasts")


class FromLogProb(Likelihood):
    """A likelihood from a log-probability; of an indefinite Hessian the PSD part is used.

    Args:
        function: log_prob(f, y) -> [n] of outputs f [n, ...] and targets y.
        temperature: tau, by which log-probabilities are divided.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], temperature: float = 1.0):
        super().__init__(temperature)
        self._function = function

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self._function(f, y)


def scale_text(name: str, log_value: Tensor) -> str:
    """A scale by name and value, and whether it is learned."""
    learned = " (learned)" if log_value.requires_grad else ""
    return f"{name}={log_value.detach().exp().item():.4g}{learned}"


def probit_scaled(f: Tensor, variance: Tensor) -> Tensor:
    """Logits shrunk by their variance, f / sqrt(1 + pi variance / 8) (MacKay 1992)."""
    return f / torch.sqrt(1 + math.pi * variance / 8)


def _slope_of_column(slope: Tensor, column: int, f: Tensor) -> Tensor:
    """The derivative [n, C] of column [n] of d log p / df in the outputs f [n, C]."""
    if not slope.requires_grad:
        return torch.zeros_like(f)
    total = slope[:, column].sum()
    (second,) = torch.autograd.grad(total, f, create_graph=True, allow_unused=True)
    return torch.zeros_like(f) if second is None else second


def _columns_of(matrix: Tensor, columns: Tensor) -> Tensor:
    """Columns [n, R, K] of each datum's matrix [n, R, C], by their numbers [n, K]."""
    return matrix.gather(2, columns.unsqueeze(1).expand(-1, matrix.shape[1], -1))
