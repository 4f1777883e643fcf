"""Classes, with softmax outputs; one class axis, any number of further axes (pixels, tokens).

With targets t, a weight for each class (one of one class, soft labels, class weights, all zero for
an ignored position), and class probabilities p,

    log p(t | f) = sum_c t_c log p_c,    Lambda = s (diag(p) - p p^T),    s = sum_c t_c

The roots for s = 1, all in log space so that their derivatives stay finite when the softmax
saturates:

    fisher      U = diag(sqrt p) - p sqrt(p)^T:  column r is sqrt(p_r) d log p_r / df
    symmetric   U = Lambda^{1/2}
    eigen       U = V E^{1/2}, columns by decreasing eigenvalue

Lambda ignores a common shift of the outputs, so C - 1 contrasts Q (orthonormal, orthogonal to the
shift) carry all of it: Q^T Lambda Q = T T^T with T = Q^T U W, U the Fisher root and W the C - 1
directions orthogonal to its null vector.

Any partition of the columns of a true root gives a lower bound of the evidence. The published
estimator ("paper") takes the sub-block of Lambda at the chosen outputs instead, p_c (1 - p_c) for a
single one, which is not a bound: with one datum, two classes and J P0^-1 J^T = q [[1, -1], [-1,
1]], Lambda = a [[1, -1], [-1, 1]], the exact determinant is 1 + 4 q a, the product over single
outputs (1 + q a)^2, which is smaller whenever 0 < q a < 2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from asdl_marglik import eigen_root, psd_sqrt
from laplace_marglik.errors import MarglikError
from laplace_marglik.likelihood.base import Likelihood, Root, probit_scaled

# Soft labels are probabilities, often in half precision; labels of several classes at once sum to
# more.
SUM_OF_SOFT_LABELS = 1e-2


class Categorical(Likelihood):
    """y in {0, ..., C - 1} with logits f [n, C] or f [n, C, ...], as in `cross_entropy`.

    Targets are class indices [n] or [n, ...], or soft labels shaped as f: probabilities of the
    classes, all zero where a position is ignored. The log-probability of a datum is the sum over
    its positions; weights of classes are not normalised.

    Args:
        temperature: tau, by which log-probabilities are divided.
        learn_temperature: whether `log_temperature` requires grad.
        class_axis: of the outputs, 1, or -1 for [n, ..., C] as token classifiers give them.
        ignore_index: the class index of positions that do not count.
        label_smoothing: share of every target that is spread evenly over all classes.
        class_weights: how often a target of each class counts [C].
    """

    constant_log_prob = True
    discrete = True
    draws_targets = True
    class_weights: Tensor | None

    def __init__(
        self,
        temperature: float = 1.0,
        *,
        learn_temperature: bool = False,
        class_axis: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        class_weights: Tensor | None = None,
    ):
        super().__init__(temperature, learn_temperature=learn_temperature)
        if class_axis not in (1, -1):
            raise MarglikError(f"class_axis must be 1 or -1, got {class_axis!r}")
        if not 0 <= label_smoothing <= 1:
            raise MarglikError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
        self.class_axis = class_axis
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.register_buffer("class_weights", _checked_weights(class_weights), persistent=False)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        # a part of every training step: few operations where there is one position
        logits = f if f.dim() == 2 else self._by_position(f).flatten(0, 1)
        y = self._targets(f, y)
        if self._has_plain_targets(y):
            losses = cross_entropy(
                logits, y.flatten(), ignore_index=self.ignore_index, reduction="none"
            )
            return -losses if y.shape[1] == 1 else -losses.view(y.shape).sum(1)
        log_p = self._log_p(f)
        return (self._weights_of(y, log_p) * log_p).sum((1, 2))

    def predict(self, f: Tensor) -> Tensor:
        return f.softmax(self._axis(f.dim()))

    def predict_probit(self, f: Tensor, variance: Tensor) -> Tensor:
        return self.predict(probit_scaled(f, variance))

    # ---------------------------------------------------------------------------------- positions

    def _axis(self, dims: int) -> int:
        """The class axis of outputs with so many axes."""
        return 1 if self.class_axis == 1 or dims == 2 else dims - 1

    def _sizes(self, shape: torch.Size) -> tuple[int, int]:
        """Classes V and positions T of the outputs of one datum."""
        classes = shape[self._axis(len(shape) + 1) - 1]
        return classes, shape.numel() // classes

    def _log_p(self, f: Tensor) -> Tensor:
        """Log probabilities [n, T, V] at every position."""
        return self._by_position(f).log_softmax(2)

    def _by_position(self, f: Tensor) -> Tensor:
        """Outputs, or anything of their shape, as [n, T, V]."""
        if f.dim() < 2:
            raise MarglikError(f"expected logits [n, C, ...], got {tuple(f.shape)}")
        return f.movedim(self._axis(f.dim()), -1).flatten(1, -2) if f.dim() > 2 else f.unsqueeze(1)

    def _as_outputs(self, by_position: Tensor, shape: torch.Size) -> Tensor:
        """Anything [n, T, V] in the shape of the outputs."""
        axis = self._axis(len(shape))
        others = shape[:axis] + shape[axis + 1 :]
        return by_position.reshape(*others, -1).movedim(-1, axis)

    def _place(self, columns: Tensor, positions: int, classes: int) -> tuple[Tensor, Tensor]:
        """The position and the class of outputs by their numbers in memory order."""
        if self.class_axis == 1:
            return columns % positions, columns // positions
        return columns // classes, columns % classes

    def _embed(self, blocks: Tensor) -> Tensor:
        """Matrices [n, T, V, V] of all positions as one over the outputs [n, V T, V T]."""
        n, positions, classes, _ = blocks.shape
        size = classes * positions
        full = torch.diag_embed(blocks.permute(0, 2, 3, 1))  # [n, V, V, T, T]
        order = (0, 1, 3, 2, 4) if self.class_axis == 1 else (0, 3, 1, 4, 2)
        return full.permute(order).reshape(n, size, size)

    # ------------------------------------------------------------------------------------ targets

    def _targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Class indices [n, T], or soft labels [n, T, V]; an error for anything else."""
        if y.is_floating_point():
            return self._soft_targets(f, y)
        axis = self._axis(f.dim())
        expected = f.shape[:axis] + f.shape[axis + 1 :]
        if y.numel() != expected.numel() or len(y) != len(f):
            last = f.dim() > 2 and axis == 1 and y.shape == f.shape[:-1]
            raise MarglikError(
                f"expected integer class indices of shape {tuple(expected)}, got {tuple(y.shape)} "
                f"of {y.dtype}"
                + ("; for classes on the last axis use Categorical(class_axis=-1)" if last else "")
            )
        y = y.reshape(len(f), -1)
        classes = f.shape[axis]
        # the usual case, in few operations
        if y.numel():
            least, most = torch.aminmax(y)
            if int(least) >= 0 and int(most) < classes:
                return y.long()
        counted = y[y != self.ignore_index]
        if counted.numel() and not (int(counted.min()) >= 0 and int(counted.max()) < classes):
            raise MarglikError(
                f"class indices must be in 0..{classes - 1}, or {self.ignore_index} to be ignored, "
                f"got {int(counted.min())}..{int(counted.max())}"
            )
        return y.long()

    def _soft_targets(self, f: Tensor, y: Tensor) -> Tensor:
        if y.shape != f.shape:
            raise MarglikError(
                f"expected integer class indices, or soft labels of the shape {tuple(f.shape)} of "
                f"the outputs, got {tuple(y.shape)} of {y.dtype}"
            )
        y = self._by_position(y)
        totals = y.sum(2)
        one = (totals - 1).abs() <= SUM_OF_SOFT_LABELS
        if not (one | (totals == 0)).all() or bool((y < 0).any()):
            raise MarglikError(
                "soft labels must be probabilities that sum to one, or all zero to be ignored, got "
                f"sums from {float(totals.min()):g} to {float(totals.max()):g}; for several "
                "classes at once use Bernoulli()"
            )
        return y

    def _has_plain_targets(self, y: Tensor) -> bool:
        """Whether every target counts once and for one class, or not at all."""
        return y.dim() == 2 and not self.label_smoothing and self.class_weights is None

    def _weights_of(self, y: Tensor, log_p: Tensor) -> Tensor:
        """Targets t [n, T, V]: how much each class counts at each position."""
        classes = log_p.shape[2]
        if y.dim() == 3:
            t = y.to(log_p)
            counts = t.sum(2, keepdim=True)
        else:
            counts = (y != self.ignore_index).unsqueeze(2).to(log_p)
            t = one_hot(y.clamp(min=0), classes).to(log_p) * counts
        smoothing = self.label_smoothing
        if smoothing:
            t = (1 - smoothing) * t + smoothing / classes * counts
        if self.class_weights is None:
            return t
        if len(self.class_weights) != classes:
            raise MarglikError(
                f"class_weights has {len(self.class_weights)} entries for {classes} classes"
            )
        return t * self.class_weights.to(t)

    def _root_counts(self, f: Tensor, y: Tensor, log_p: Tensor) -> Tensor | None:
        """sqrt(s) [n, T]; None if all are one."""
        y = self._targets(f, y)
        if not self._has_plain_targets(y):
            return self._weights_of(y, log_p).sum(2).sqrt()
        counted = y != self.ignore_index
        return None if counted.all() else counted.to(log_p)

    # ------------------------------------------------------------------------------------- slopes

    def slope(self, f: Tensor, y: Tensor) -> Tensor:
        """t - s p at every position.

        Args:
            f: logits [n, C] or [n, C, ...].
            y: targets.
        """
        log_p = self._log_p(f)
        t = self._weights_of(self._targets(f, y), log_p)
        return self._as_outputs(t - t.sum(2, keepdim=True) * log_p.exp(), f.shape)

    def n_uniforms(self, shape: torch.Size) -> int:
        return self._sizes(shape)[1]

    def drawn_slope(self, f: Tensor, y: Tensor, uniforms: Tensor) -> Tensor:
        """sqrt(s) (e_c - p) with a class c of probability p_c drawn at every position.

        Args:
            f: logits [n, C] or [n, C, ...].
            y: targets, which say how often a position counts.
            uniforms: one for each position [n, T].
        """
        log_p = self._log_p(f)
        p = log_p.exp()
        below = p.detach().cumsum(2) <= uniforms.unsqueeze(2)
        classes = p.shape[2]
        drawn = below.sum(2).clamp(max=classes - 1)
        slope = one_hot(drawn, classes) - p
        counts = self._root_counts(f, y, log_p)
        return self._as_outputs(slope if counts is None else slope * counts.unsqueeze(2), f.shape)

    # ---------------------------------------------------------------------------------- curvature

    def hessian(self, f: Tensor, y: Tensor) -> Tensor:
        log_p = self._log_p(f)
        blocks = _curvature(log_p.exp())
        return self._embed(_scaled(blocks, self._root_counts(f, y, log_p), power=2))

    def contrasts(self, shape: torch.Size) -> Tensor | None:
        classes, positions = self._sizes(shape)
        if classes < 2:
            return None
        Q = _contrasts(classes).mT.contiguous()
        each = torch.eye(positions, dtype=torch.float64)
        return torch.kron(Q, each) if self.class_axis == 1 else torch.kron(each, Q)

    def contrast_root(self, f: Tensor, y: Tensor) -> Tensor:
        log_p = self._log_p(f)
        classes = log_p.shape[2]
        root_p = torch.exp(log_p / 2)
        # a reflection takes the null vector sqrt(p) to the last axis; its other columns are W
        last = one_hot(torch.tensor(classes - 1), classes).to(log_p)
        normal = root_p + last
        normal = normal / normal.norm(dim=2, keepdim=True)
        U = _fisher_root(log_p)
        reflected = U - 2 * (U @ normal.unsqueeze(3)) * normal.unsqueeze(2)
        Q = _contrasts(classes).to(log_p)
        blocks = Q.mT @ reflected[..., :-1]
        return self._embed(_scaled(blocks, self._root_counts(f, y, log_p)))

    def root(self, f: Tensor, y: Tensor, kind: Root, columns: Tensor) -> Tensor:
        log_p = self._log_p(f)
        n, positions, classes = log_p.shape
        position, label = self._place(columns, positions, classes)
        index = torch.arange(n, device=f.device).unsqueeze(1)
        if kind == "fisher":
            at_columns = log_p[index, position]  # [n, K, V]
            root_p = torch.exp(at_columns.gather(2, label.unsqueeze(2)) / 2)
            chosen = root_p * (one_hot(label, classes) - at_columns.exp())
        else:
            U = _dense_root(log_p, kind)
            chosen = U[index, position, :, label]  # [n, K, V]
        counts = self._root_counts(f, y, log_p)
        if counts is not None:
            chosen = chosen * counts.gather(1, position).unsqueeze(2)
        at_position = one_hot(position, positions).to(chosen)  # [n, K, T]
        order = "nkv,nkt->nvtk" if self.class_axis == 1 else "nkv,nkt->ntvk"
        return torch.einsum(order, chosen, at_position).reshape(n, classes * positions, -1)

    def root_product(self, f: Tensor, y: Tensor, xi: Tensor) -> Tensor:
        """sqrt(p) xi - p (sqrt(p) . xi): the Fisher root times xi, without its matrix.

        Args:
            f: logits [n, C] or [n, C, ...].
            y: targets, which say how often a position counts.
            xi: k vectors, each shaped as the outputs [k, n, ...].
        """
        axis = self._axis(f.dim())
        scaled = torch.exp(f.log_softmax(axis) / 2) * xi
        product = scaled - f.softmax(axis) * scaled.sum(axis + 1, keepdim=True)
        return product if (counts := self._spread_counts(f, y)) is None else product * counts

    def hessian_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        axis = self._axis(f.dim())
        p = f.softmax(axis)
        product = p * (v - (p * v).sum(axis + 1, keepdim=True))
        counts = self._spread_counts(f, y)
        return product if counts is None else product * counts.square()

    def _spread_counts(self, f: Tensor, y: Tensor) -> Tensor | None:
        """sqrt(s) in a shape that multiplies outputs; None if all are one."""
        counts = self._root_counts(f, y, self._log_p(f))
        if counts is None:
            return None
        axis = self._axis(f.dim())
        return counts.reshape(f.shape[:axis] + f.shape[axis + 1 :]).unsqueeze(axis)

    def block_root(self, f: Tensor, y: Tensor, columns: Tensor) -> Tensor | None:
        """diag(sqrt p) - c p sqrt(p)^T over the chosen outputs of each position, times sqrt(s).

        c = 1 / (1 + sqrt(1 - sum p)), the sum over the chosen outputs of the position.

        Args:
            f: logits [n, C] or [n, C, ...].
            y: targets, which say how often a position counts.
            columns: numbers of the outputs of each datum [n, K].
        """
        log_p = self._log_p(f)
        _, positions, classes = log_p.shape
        position, label = self._place(columns, positions, classes)
        index = torch.arange(len(log_p), device=f.device).unsqueeze(1)
        chosen = log_p[index, position, label]  # [n, K]
        selected = torch.zeros_like(log_p, dtype=torch.bool, requires_grad=False)
        selected[index, position, label] = True
        c = (1 / (1 + _root_of_rest(log_p, selected))).gather(1, position)  # [n, K]
        same_position = (position.unsqueeze(2) == position.unsqueeze(1)).to(chosen.dtype)
        root_p = torch.exp(chosen / 2)
        scaled_p = c * chosen.exp()
        outer = scaled_p.unsqueeze(2) * root_p.unsqueeze(1)
        root = torch.diag_embed(root_p) - outer * same_position
        counts = self._root_counts(f, y, log_p)
        return root if counts is None else root * counts.gather(1, position).unsqueeze(2)

    def extra_repr(self) -> str:
        options = [super().extra_repr()]
        if self.class_axis != 1:
            options.append(f"class_axis={self.class_axis}")
        if self.label_smoothing:
            options.append(f"label_smoothing={self.label_smoothing:g}")
        if self.class_weights is not None:
            options.append(f"class_weights of {len(self.class_weights)} classes")
        return ", ".join(options)


class NextToken(Categorical):
    """Language models: the outputs [n, T, C] at position t are logits of the token at t + 1.

    Targets [n, T] are the tokens themselves, unshifted, with `ignore_index` where one does not
    count (padding, prompts), as the data collators of transformers make them.

    Args:
        temperature: tau, by which log-probabilities are divided.
        learn_temperature: whether `log_temperature` requires grad.
        ignore_index: the token of positions that do not count.
        label_smoothing: share of every target that is spread evenly over all tokens.
    """

    def __init__(
        self,
        temperature: float = 1.0,
        *,
        learn_temperature: bool = False,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ):
        super().__init__(
            temperature,
            learn_temperature=learn_temperature,
            class_axis=-1,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )

    def _targets(self, f: Tensor, y: Tensor) -> Tensor:
        if y.dim() != 2 or y.is_floating_point() or f.dim() != 3:
            raise MarglikError(
                "expected logits [n, T, C] and tokens [n, T], got logits "
                f"{tuple(f.shape)} and {tuple(y.shape)} of {y.dtype}"
            )
        last = torch.full_like(y[:, :1], self.ignore_index)  # nothing comes after it
        return super()._targets(f, torch.cat([y[:, 1:], last], 1))


def _checked_weights(weights: Tensor | None) -> Tensor | None:
    """Weights of classes, if they are finite and not negative."""
    if weights is None:
        return None
    weights = torch.as_tensor(weights, dtype=torch.float64)
    if weights.dim() != 1 or not (weights.isfinite() & (weights >= 0)).all():
        raise MarglikError(
            "class_weights must be one finite number for each class, none below zero, got "
            f"{weights.tolist()}"
        )
    return weights


def _scaled(blocks: Tensor, factors: Tensor | None, power: int = 1) -> Tensor:
    """Matrices [n, T, V, V] times a power of the factor of their position [n, T]."""
    if factors is None:
        return blocks
    return blocks * factors.pow(power).unsqueeze(2).unsqueeze(3)


def _dense_root(log_p: Tensor, kind: Root) -> Tensor:
    """A root [n, T, V, V] made by an eigen-decomposition at every position."""
    curvature = _curvature(log_p.exp())
    return eigen_root(curvature) if kind == "eigen" else psd_sqrt(curvature)


def _curvature(p: Tensor) -> Tensor:
    """Lambda = diag(p) - p p^T [n, T, V, V] of class probabilities p [n, T, V]."""
    return torch.diag_embed(p) - p.unsqueeze(3) * p.unsqueeze(2)


def _fisher_root(log_p: Tensor) -> Tensor:
    """U = diag(sqrt p) - p sqrt(p)^T [n, T, V, V] of log probabilities [n, T, V]."""
    root_p = torch.exp(log_p / 2)
    return torch.diag_embed(root_p) - log_p.exp().unsqueeze(3) * root_p.unsqueeze(2)


def _root_of_rest(log_p: Tensor, selected: Tensor) -> Tensor:
    """sqrt(1 - sum p) [n, T], the sum over the selected classes of each position [n, T, V]."""
    rest = log_p.masked_fill(selected, -torch.inf)
    some_left = (~selected).any(2)
    # logsumexp of nothing has no derivative
    safe = rest.masked_fill(~some_left.unsqueeze(2), 0.0)
    return torch.exp(safe.logsumexp(2) / 2) * some_left


def _contrasts(classes: int) -> Tensor:
    """Helmert's orthonormal contrasts Q [V, V - 1]: a class against the mean of those before."""
    before = torch.triu(torch.ones(classes, classes - 1, dtype=torch.float64))
    against = torch.diag(torch.arange(1.0, classes), -1)[:, :-1]
    Q = before - against
    return Q / Q.norm(dim=0)
