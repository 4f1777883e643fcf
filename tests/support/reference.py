"""The naive float64 oracle: every quantity of the library written out as its definition.

Data points are passed through the network one at a time and derivatives are plain
`torch.autograd.grad` (torch.func's second derivatives are wrong through normalisation layers).
Results keep their graph and can be differentiated in hyperparameters, except through eigh of a
singular matrix ("symmetric", "eigen", "paper" with K > 1) and through torch's fused attention:
there, and whenever in doubt, `finite_difference` decides.

Shapes: n data points, C outputs (all output axes flattened in memory order), K root columns,
P weights, A augmentation samples, T shared positions of a layer.
"""

import math
from collections import Counter, defaultdict, namedtuple

import torch
from torch import nn
from torch.nn import functional as F

from asdl_marglik import naive

# kind: categorical | gaussian | bernoulli | poisson | heteroscedastic; log p is divided by tau
Likelihood = namedtuple("Likelihood", "kind sigma tau", defaults=(1.0, 1.0))
# `log_det_ratio` includes the number of blocks M
Evidence = namedtuple("Evidence", "total log_likelihood scatter log_det_ratio")


def weight_names(model, hyper=()):
    """Names of the weights: parameters that require grad, less the hyperparameters `hyper`."""
    return [k for k, p in model.named_parameters() if p.requires_grad and k not in hyper]


def weights(model, names):
    """The named weights as one vector [P]."""
    params = dict(model.named_parameters())
    return torch.cat([params[name].reshape(-1) for name in names])


def per_weight(model, names, values):
    """One value per parameter tensor [len(names)], repeated for each of its entries: [P]."""
    params = dict(model.named_parameters())
    return torch.cat([v.expand(params[k].numel()) for k, v in zip(names, values, strict=True)])


def batches(x, augmented):
    """Per data point the list of its A augmentation samples (or itself), as batches of one."""
    if isinstance(x, dict):
        parts = zip(*(batches(value, augmented) for value in x.values()), strict=True)
        return [[dict(zip(x, b, strict=True)) for b in zip(*p, strict=True)] for p in parts]
    return [list(xi.split(1)) if augmented else [xi[None]] for xi in x]


def outputs(model, x, augmented=False):
    """All f(x_i), [n, C...]; `augmented`: x is [n, A, ...] and f the mean over samples."""
    return torch.cat([sum(map(model, b)) / len(b) for b in batches(x, augmented)])


def jacobian(model, x, names, augmented=False):
    """J[i, c] = d f_c(x_i) / d w: [n, C, P]."""
    params = [dict(model.named_parameters())[name] for name in names]
    f = outputs(model, x, augmented).flatten(1)
    J = [[torch.cat([g.reshape(-1) for g in gradients(fc, params)]) for fc in fi] for fi in f]
    return torch.stack([torch.stack(Ji) for Ji in J])


def gradients(scalar, tensors):
    """Gradients of a scalar in each tensor, zero where it does not depend on it."""
    grads = torch.autograd.grad(scalar, tensors, create_graph=True, materialize_grads=True)
    # Through a flat view, second derivatives arrive with plain strides: the backward of eval-mode
    # batch_norm is wrong for a batch of one whose cotangent has strides such as (C, 1, W*C, C).
    return [g.reshape(-1).view_as(t) for g, t in zip(grads, tensors, strict=True)]


def log_prob(likelihood, f, y):
    """sum_i log p(y_i | f_i) / tau, constants included; f [n, C...], classes on axis 1."""
    kind, sigma, tau = likelihood
    if kind == "categorical":
        terms = f.log_softmax(1).gather(1, y.unsqueeze(1))
    elif kind == "gaussian":
        sigma = torch.as_tensor(sigma, dtype=f.dtype)
        terms = -0.5 * ((y - f) / sigma) ** 2 - sigma.log() - 0.5 * math.log(2 * math.pi)
    elif kind == "bernoulli":
        terms = y * F.logsigmoid(f) + (1 - y) * F.logsigmoid(-f)
    elif kind == "poisson":
        terms = y * f - f.exp() - torch.lgamma(y + 1)
    elif kind == "heteroscedastic":
        m, s = f.chunk(2, dim=1)  # s = log variance
        terms = -0.5 * (y - m) ** 2 * torch.exp(-s) - 0.5 * s - 0.5 * math.log(2 * math.pi)
    else:
        raise ValueError(f"unknown likelihood {kind!r}")
    return terms.sum() / tau


def autograd_hessian(likelihood, f, y):
    """Observed Hessian of -log p / tau in each f_i, by double differentiation: [n, C, C]."""
    hessians = [
        torch.autograd.functional.hessian(lambda v: -log_prob(likelihood, v[None], yi[None]), fi)  # noqa: B023
        for fi, yi in zip(f, y, strict=True)
    ]
    return torch.stack(hessians).reshape(len(f), f[0].numel(), -1)


def _diagonal(likelihood, f):
    """Diagonal of Lambda [n, C] for the likelihoods where Lambda is diagonal."""
    kind, sigma, tau = likelihood
    if kind == "gaussian":
        diagonal = torch.as_tensor(sigma, dtype=f.dtype) ** -2 * torch.ones_like(f)
    elif kind == "bernoulli":
        diagonal = f.sigmoid() * (-f).sigmoid()
    elif kind == "poisson":
        diagonal = f.exp()
    elif kind == "heteroscedastic":  # expected (Fisher) Hessian: the observed one is indefinite
        s = f.chunk(2, dim=1)[1]  # log variance
        diagonal = torch.cat([torch.exp(-s), 0.5 * torch.ones_like(s)], 1)
    return diagonal.reshape(len(f), -1) / tau


def _embed(blocks):
    """Matrices of each position, [n, T, C, C], as one [n, C*T, C*T] with index (c, t)."""
    n, t, c, _ = blocks.shape
    return torch.einsum("ntcr,ts->nctrs", blocks, torch.eye(t).to(blocks)).reshape(n, c * t, c * t)


def _softmax(f):
    """Class probabilities at each position, [n, T, C]; T = 1 for outputs [n, C]."""
    return f.softmax(1).reshape(*f.shape[:2], -1).transpose(1, 2)


def _softmax_hessian(p):
    """diag(p) - p p^T."""
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def hessian(likelihood, f):
    """Lambda(f) = Hessian of -log p / tau (expected one if heteroscedastic): [n, C, C]."""
    if likelihood.kind == "categorical":
        return _embed(_softmax_hessian(_softmax(f))) / likelihood.tau
    return torch.diag_embed(_diagonal(likelihood, f))


def psd_root(matrix, kind="symmetric"):
    """Root of PSD matrices by eigh: symmetric Q sqrt(L) Q^T, or eigen Q sqrt(L), decreasing L."""
    values, q = torch.linalg.eigh(matrix)
    u = q * values.clamp(min=0).sqrt().unsqueeze(-2)
    return {"symmetric": u @ q.mT, "eigen": u.flip(-1)}[kind]


def root(likelihood, f, kind):
    """U with U U^T = Lambda, [n, C, C]; at each position for outputs with extra axes.

    fisher diag(sqrt p) - p sqrt(p)^T; symmetric and eigen as in `psd_root`; for a diagonal
    Lambda all are its square root.
    """
    if likelihood.kind != "categorical":
        return torch.diag_embed(_diagonal(likelihood, f).sqrt())
    p = _softmax(f)
    if kind == "fisher":
        blocks = torch.diag_embed(p.sqrt()) - p[..., :, None] * p.sqrt()[..., None, :]
    else:
        blocks = psd_root(_softmax_hessian(p), kind)
    return _embed(blocks) / likelihood.tau**0.5


def cotangents(likelihood, f, columns=None, kind="paper"):
    """Output cotangents W [n, C, K] of the root rows V = W^T J of a block.

    True roots: W = U[:, :, columns]. "paper": a root of the sub-block Lambda[columns, columns],
    zero elsewhere (the same thing when Lambda is diagonal).
    columns: [K] shared, [n, K] per data point, None all. "gradients": columns are R sets of
    targets, and W has the gradients of their log p, each datum counted 1 / (R tau) times.
    """
    if kind == "gradients":
        return slopes(likelihood, f, columns)
    n, c = len(f), f[0].numel()
    columns = torch.as_tensor(range(c) if columns is None else columns).expand(n, -1)
    if kind != "paper" or likelihood.kind != "categorical":
        u = root(likelihood, f, kind)
        return torch.stack([u[i][:, columns[i]] for i in range(n)])
    lam = hessian(likelihood, f)
    subs = torch.stack([lam[i][columns[i]][:, columns[i]] for i in range(n)])
    return F.one_hot(columns, c).to(subs).mT @ psd_root(subs)


def slopes(likelihood, f, targets):
    """d log p(y_r | f) / df [n, C, R] over sqrt(R tau), for R fixed sets of targets y_r."""
    of_one = likelihood._replace(tau=1.0)
    found = [gradients(log_prob(of_one, f, y), [f])[0].flatten(1) for y in targets]
    return torch.stack(found, 2) / (len(targets) * likelihood.tau) ** 0.5


def rows(J, W):
    """Root rows V = W^T J of a block: J [n, C, P], W [n, C, K] -> [n*K, P]."""
    return naive.root_rows(J, W)


def tensor_blocks(model, names):
    """Indices of each parameter tensor in the weight vector."""
    params = dict(model.named_parameters())
    return list(torch.arange(len(weights(model, names))).split([params[k].numel() for k in names]))


def module_blocks(model, names):
    """Indices of each module's own parameters (a layer's weight and bias together)."""
    groups = defaultdict(list)
    for name, block in zip(names, tensor_blocks(model, names), strict=True):
        groups[name.rpartition(".")[0]].append(block)
    return [torch.cat(group) for group in groups.values()]


def log_det_ratio(structure, V, delta, blocks=None):
    """log|I + P0^-1 H| of the rows V [rows, P] for ntk | full | blockdiag | diag, delta [P]."""
    if structure in ("ntk", "full"):
        dual, primal = naive.log_det_kernel(V, delta), naive.log_det_full(V, delta)
        torch.testing.assert_close(dual, primal, rtol=1e-8, atol=1e-7)
        return dual if structure == "ntk" else primal
    if structure == "blockdiag":
        return naive.log_det_blocks(V, delta, blocks)
    if structure == "diag":
        return naive.log_det_diagonal(V, delta)
    raise ValueError(f"unknown structure {structure!r}")


def kron_layers(model):
    """Modules with a Kronecker rule: Linear, and zero-padded ungrouped Conv1d/2d/3d."""
    for prefix, module in model.named_modules():
        conv = isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
        plain = conv and module.groups == 1 and module.padding_mode == "zeros"
        if plain or isinstance(module, nn.Linear):
            yield prefix, module


def positions(module, tensor, inputs):
    """A layer's inputs (unfolded patches) or outputs as [T, features]."""
    if isinstance(module, nn.Linear):
        return tensor.reshape(-1, tensor.shape[-1])
    if inputs:  # im2col as a convolution whose filters pick one entry of the patch each
        shape = module.weight.shape[1:]
        pick = torch.eye(shape.numel()).to(tensor).reshape(-1, *shape)
        conv = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[tensor.dim()]
        tensor = conv(tensor, pick, None, module.stride, module.padding, module.dilation)
    return tensor.flatten(2).transpose(1, 2).reshape(-1, tensor.shape[1])


def record(model, x):
    """Run one batch of one: f [C] and, per Kronecker layer, its calls [(input, output), ...]."""
    calls = defaultdict(list)

    def hook(module, args, out):
        if out.requires_grad:  # not so for frozen layers on the data
            calls[module].append((args[0].clone(), out))
        return out.clone()  # so that a later in-place activation leaves `out` alone

    handles = [module.register_forward_hook(hook) for _, module in kron_layers(model)]
    try:
        return model(x)[0].reshape(-1), calls
    finally:
        for handle in handles:
            handle.remove()


def kfac(model, x, W, names, sharing="expand", augmented=False, dense=()):
    """Kronecker factors of H, one block per parameter tensor: {name: (B, A)}.

    a_it layer inputs (mean over augmentation samples), g_ikt output cotangents of row (i, k)
    (sum over samples of cotangents seeded with W/A); a module called several times has the
    positions t of all its calls. Weight (B, A), bias (B,), any other tensor its exact (H,):

        expand  A = 1/(n T) sum_it a a^T                B = sum_ik sum_t g g^T
        reduce  A = 1/n sum_i (mean_t a)(mean_t a)^T    B = sum_ik (sum_t g)(sum_t g)^T

    Exact blocks: `dense` names, tensors that are shared between modules, layers never called
    (such as attention's out_proj). Weight block = kron(B, A). W [n, C, K] from `cotangents`.
    """
    data = batches(x, augmented)
    totals = defaultdict(lambda: (0.0, 0.0))  # module -> (A, B)
    for samples, w in zip(data, W, strict=True):
        a, g = defaultdict(float), defaultdict(float)  # module -> [T, D] and [K, T, O]
        for sample in samples:
            f, calls = record(model, sample)
            for module, pairs in calls.items():
                ins, outs = zip(*pairs, strict=True)
                grads = [gradients(f @ wk / len(samples), outs) for wk in w.mT]
                a[module] += torch.cat([positions(module, z, True) for z in ins]) / len(samples)
                cots = [torch.cat([positions(module, z, False) for z in row]) for row in grads]
                g[module] += torch.stack(cots)
        for module in a:
            ai, gi = a[module], g[module]
            if sharing == "reduce":
                ai, gi = ai.mean(0, keepdim=True), gi.sum(1, keepdim=True)
            A, B = totals[module]
            A = A + ai.mT @ ai / len(ai) / len(data)
            totals[module] = (A, B + torch.einsum("kto,ktp->op", gi, gi))

    owners = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    factors = {}
    for prefix, module in kron_layers(model):
        if module in totals:
            A, B = totals[module]
            for tail, parts in (("weight", (B, A)), ("bias", (B,))):
                if owners[getattr(module, tail)] == 1:
                    factors[f"{prefix}.{tail}".lstrip(".")] = parts
    for name in names:
        if name not in factors or name in dense:
            V = rows(jacobian(model, x, [name], augmented), W)
            factors[name] = (V.mT @ V,)
    return {name: factors[name] for name in names}


def kfac_log_det(factors, delta):
    """sum over tensors of log|I + P0^-1 (B kron A)|, by the dense Kronecker product; delta [P]."""
    one = torch.ones(1, 1).to(delta)  # A of a bias, or of a tensor with its exact block
    sizes = [torch.Size(map(len, parts)).numel() for parts in factors.values()]
    terms = zip(factors.values(), delta.split(sizes), strict=True)
    return sum(naive.log_det_kronecker((*parts, one)[1], parts[0], d) for parts, d in terms)


def evidence(
    model,
    x,
    y,
    likelihood,
    delta,
    *,
    structure="ntk",
    n_data=None,
    columns=None,
    root="paper",
    mean=0.0,
    names=None,
    blocks=None,
    sharing="expand",
    augmented=False,
    dense=(),
):
    """log q = (N/S) sum log p / tau - 1/2 sum delta (w - mean)^2 - 1/2 M log-det, M = (N/S)(C/K).

    delta [P] in the order of `names` (default: all weights); blockdiag defaults to `module_blocks`;
    structure: ntk | full | blockdiag | kfac | diag; root: paper | fisher | symmetric | eigen, or
    gradients, with the targets as columns (see `cotangents`).
    """
    names = weight_names(model) if names is None else names
    f = outputs(model, x, augmented)
    W = cotangents(likelihood, f, columns, root)
    if structure == "kfac":
        log_det = kfac_log_det(kfac(model, x, W, names, sharing, augmented, dense), delta)
    else:
        V = rows(jacobian(model, x, names, augmented), W)
        blocks = module_blocks(model, names) if blocks is None else blocks
        log_det = log_det_ratio(structure, V, delta, blocks)
    scale = 1.0 if n_data is None else n_data / len(f)
    fit = scale * log_prob(likelihood, f, y)
    scatter = (delta * (weights(model, names) - mean) ** 2).sum()
    of_columns = 1 if root == "gradients" else f[0].numel() / W.shape[2]
    log_det = scale * of_columns * log_det
    return Evidence(fit - 0.5 * scatter - 0.5 * log_det, fit, scatter, log_det)


def linear_regression_evidence(X, y, sigma, mean, delta):
    """log N(y; X mean, sigma^2 I + X diag(1/delta) X^T): X [N, P], y [N], mean and delta [P]."""
    cov = sigma**2 * torch.eye(len(y)).to(X) + X @ torch.diag(1 / delta) @ X.mT
    return torch.distributions.MultivariateNormal(X @ mean, cov).log_prob(y)


def finite_difference(fn, param, eps=1e-5):
    """Central differences of the scalar fn() in every entry of `param`, which is put back after."""
    grad = torch.zeros_like(param, requires_grad=False)
    flat = param.detach().view(-1)  # shares memory with param
    for i, value in enumerate(flat.tolist()):
        for sign in (1, -1):
            flat[i] = value + sign * eps
            grad.view(-1)[i] += sign * torch.as_tensor(fn()).detach() / (2 * eps)
        flat[i] = value
    return grad
