"""The naive float64 oracle of conditioned bounds: every formula as it stands, nothing shared with
the library.

Row r = i C + c is column c of a true root U_i (U_i U_i^T = Lambda_i) times the Jacobian of datum i,
v_r = U_i[:, c]^T J_i, and A = I + V P0^-1 V^T over all N C rows. With inducing rows U (u of them)
and a block B of b other rows, m = (N C - u) / b,

    upper side    log|A_U| + m (log|A_{U+B}| - log|A_U|)
    lower sides   log|A_U| + log(1 + m tr(S_B - I))   and   log|A_{U+B}|

with S_B = A_B - A_BU A_U^-1 A_UB. In expectation over B they enclose log|A|. Determinants are
`slogdet` of submatrices, and Schur complements are solved for explicitly. Shapes: n data points,
C outputs, P weights.
"""

import itertools
import math
from collections import namedtuple

import reference
import torch
from torch.func import functional_call, jacrev

Estimate = namedtuple("Estimate", "total log_likelihood scatter log_det_ratio")
Sides = namedtuple("Sides", "upper trace block")


# --------------------------------------------------------------------------------------------- rows


def outputs_and_jacobians(model, names, x, augmented=False):
    """f [n, C] and J [n, C, P] of each datum alone; `augmented`: x is [n, A, ...], f their mean."""
    parameters = dict(model.named_parameters())
    weights = {name: parameters[name] for name in names}

    def output(w, x_i):
        return functional_call(model, w, (x_i if augmented else x_i[None],)).mean(0).reshape(-1)

    f = torch.stack([output(weights, x_i) for x_i in x])
    J = []
    for x_i in x:
        of_each = jacrev(output)(weights, x_i)
        J.append(torch.cat([of_each[name].reshape(f.shape[1], -1) for name in names], 1))
    return f, torch.stack(J)


def log_probs(likelihood, f, y):
    """log p(y_i | f_i) / tau of each datum [n]."""
    pairs = zip(f, y, strict=True)
    return torch.stack([reference.log_prob(likelihood, f_i[None], y_i[None]) for f_i, y_i in pairs])


def curvature(likelihood, f, y):
    """Lambda_i [n, C, C]: the Hessian of -log p / tau in f_i, by differentiating twice.

    Its expectation over y where it depends on y (heteroscedastic): quadratic in y, so that the two
    points m - sd and m + sd integrate it exactly.
    """
    if likelihood.kind == "heteroscedastic":
        mean, log_variance = f.chunk(2, 1)
        sd = torch.exp(log_variance / 2)
        return sum(_observed(likelihood, f, mean + sign * sd) for sign in (-1, 1)) / 2
    return _observed(likelihood, f, y)


def _observed(likelihood, f, y):
    def negative(f_i, y_i):
        return -reference.log_prob(likelihood, f_i[None], y_i[None])

    hessian = jacrev(jacrev(negative))
    return torch.stack([hessian(f_i, y_i) for f_i, y_i in zip(f, y, strict=True)])


def true_root(likelihood, f, y, kind):
    """U_i with U_i U_i^T = Lambda_i [n, C, C]; every root of a diagonal Lambda is its square root.

    fisher: column r is sqrt(p_r) d log p_r / df; symmetric: Q E^1/2 Q^T; eigen: Q E^1/2, by
    decreasing eigenvalue. The smallest eigenvalue of a softmax is 0, for a common shift of the
    logits; the square root of its rounding would be felt in the eighth digit.
    """
    Lambda = curvature(likelihood, f, y)
    if likelihood.kind != "categorical":
        return torch.diag_embed(Lambda.diagonal(dim1=1, dim2=2).sqrt())
    if kind == "fisher":
        p = f.softmax(1)
        score = torch.eye(f.shape[1]).to(p) - p.unsqueeze(2)  # [n, C, r]
        return score * p.sqrt().unsqueeze(1) / likelihood.tau**0.5
    values, Q = torch.linalg.eigh(Lambda)
    values = torch.cat([torch.zeros_like(values[:, :1]), values[:, 1:].clamp_min(0)], 1)
    root = Q * values.sqrt().unsqueeze(1)
    return {"symmetric": root @ Q.mT, "eigen": root.flip(2)}[kind]


def all_rows(model, names, x, y, likelihood, root, augmented=False):
    """Every row V [n C, P] of a data set, and log p / tau of each datum [n]."""
    f, J = outputs_and_jacobians(model, names, x, augmented)
    V = torch.einsum("ncr,ncp->nrp", true_root(likelihood, f, y, root), J).flatten(0, 1)
    return V, log_probs(likelihood, f, y)


def kernel(V, delta):
    """A = I + V P0^-1 V^T of all rows V [r, P], delta [P]."""
    return torch.eye(len(V)).to(V) + (V / delta) @ V.mT


# ------------------------------------------------------------------------------------------- bounds


def log_det(A, rows):
    """log|A| over the given rows: one set [k], or many [..., k]."""
    rows = torch.as_tensor(rows, dtype=torch.long)
    if rows.shape[-1] == 0:
        return torch.zeros(rows.shape[:-1]).to(A)
    return torch.linalg.slogdet(A[rows.unsqueeze(-1), rows.unsqueeze(-2)]).logabsdet


def together(U, B):
    """The rows of U followed by those of every B: [u], [..., b] -> [..., u + b]."""
    U, B = torch.as_tensor(U, dtype=torch.long), torch.as_tensor(B, dtype=torch.long)
    return torch.cat([U.expand(*B.shape[:-1], -1), B], -1)


def multiplicity(A, U, B):
    """m = (n_rows - u) / b."""
    return (len(A) - len(U)) / torch.as_tensor(B).shape[-1]


def upper_side(A, U, B):
    """log|A_U| + m (log|A_{U+B}| - log|A_U|), for one B or many."""
    given = log_det(A, U)
    return given + multiplicity(A, U, B) * (log_det(A, together(U, B)) - given)


def conditional(A, given):
    """The Schur complement of all rows given some: A - A_:G A_G^-1 A_G:."""
    given = torch.as_tensor(given, dtype=torch.long)
    if len(given) == 0:
        return A
    return A - A[:, given] @ torch.linalg.solve(A[given][:, given], A[given])


def trace_side(A, U, B):
    """log|A_U| + log(1 + m tr(S_B - I)), for one B or many."""
    excess = conditional(A, U).diagonal()[torch.as_tensor(B)] - 1
    return log_det(A, U) + torch.log1p(multiplicity(A, U, B) * excess.sum(-1))


def sides(A, U, B):
    """The upper and both lower sides of log|A|, for one B or many."""
    return Sides(upper_side(A, U, B), trace_side(A, U, B), log_det(A, together(U, B)))


def weight_space(V, delta, U, B):
    """The upper side from P x P matrices: log|P0 + H_U| + m (log|P0 + H_U + H_B| - log|P0 + H_U|)
    - log|P0|.
    """
    P0, V_U, V_B = torch.diag(delta), V[torch.as_tensor(U).long()], V[torch.as_tensor(B)]
    given = torch.logdet(P0 + V_U.mT @ V_U)
    m = (len(V) - len(U)) / len(B)
    return given + m * (torch.logdet(P0 + V_U.mT @ V_U + V_B.mT @ V_B) - given) - delta.log().sum()


def interval(totals, uppers, traces, blocks):
    """(lower, upper) of the log evidence from k blocks of one inducing set, each [k].

    mean total - 2 s.e., mean total + 1/2 (mean upper side - larger mean lower side) + 2 s.e.
    """
    error = 2 * totals.std() / math.sqrt(len(totals))
    gap = uppers.mean() - torch.maximum(traces.mean(), blocks.mean())
    return float(totals.mean() - error), float(totals.mean() + gap / 2 + error)


# ------------------------------------------------------------------------ the order of conditioning


def pivot_order(A, among=None):
    """Rows by conditional variance given those before, largest first; with these variances."""
    left = list(range(len(A)) if among is None else among)
    order, variances = [], []
    while left:
        diagonal = conditional(A, order).diagonal()[left]
        best = int(diagonal.argmax())
        variances.append(float(diagonal[best]))
        order.append(left.pop(best))
    return order, variances


# -------------------------------------------------------------------------------------- enumeration


def outside(n_rows, U):
    """The rows that are not in U."""
    taken = {int(r) for r in U}
    return [r for r in range(n_rows) if r not in taken]


def all_blocks(n_rows, U, b):
    """Every B of b rows outside U: [many, b]."""
    return torch.tensor(list(itertools.combinations(outside(n_rows, U), b)))


def all_partitions(rows, b):
    """Every way to deal rows into blocks of b, as lists of blocks."""
    if not rows:
        yield []
        return
    first, *others = rows
    for mates in itertools.combinations(others, b - 1):
        rest = [r for r in others if r not in mates]
        for blocks in all_partitions(rest, b):
            yield [(first, *mates), *blocks]


# ------------------------------------------------------------------------------------- the evidence


def estimate(V, log_p, deviation, delta, U, B, *, layers=None, log_likelihood=None):
    """The evidence from inducing rows U and a block B.

    Args:
        V: all rows [n C, P].
        log_p: log p / tau of each datum [n].
        deviation: w - mean [P].
        delta: prior precisions [P].
        U: inducing rows, numbers below n C.
        B: the block, likewise.
        layers: weights of each layer for the block-diagonal structure; None for the whole kernel.
        log_likelihood: in place of the one of these rows.
    """
    if layers is None:
        layers = [torch.arange(V.shape[1])]
    ratio = sum(upper_side(kernel(V[:, layer], delta[layer]), U, B) for layer in layers)
    if log_likelihood is None:
        n_outputs = len(V) // len(log_p)
        of_row = log_p.repeat_interleave(n_outputs) / n_outputs
        m = (len(V) - len(U)) / len(B)
        log_likelihood = of_row[torch.as_tensor(U).long()].sum() + m * of_row[B].sum()
    scatter = (delta * deviation.square()).sum()
    total = log_likelihood - 0.5 * scatter - 0.5 * ratio
    return Estimate(total, log_likelihood, scatter, ratio)
