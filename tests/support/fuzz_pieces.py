"""The pieces of random networks: one line for each way in which parameters can enter a network.

A piece takes some kinds of activation (its number of axes without the batch) and is made for a
shape.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

# kinds: axes besides the batch; tokens are integers [n, T]
TOKENS, VECTOR, SEQUENCE, IMAGE, VOLUME = range(5)
ANY = (VECTOR, SEQUENCE, IMAGE, VOLUME)
SERIES = (SEQUENCE,)
IMAGES = (IMAGE,)
VOCABULARY = 5


class Op(nn.Module):
    """function(self, x) with named parts: tensors become parameters, modules stay what they are."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, x):
        return self.function(self, x)


@dataclass(frozen=True)
class Piece:
    """make(r, shape) -> a module for inputs [n, *shape]; r draws what is left open.

    first: only at the start of a network. alone: a network of its own, with a head without weights.
    """

    kinds: tuple
    make: Callable
    first: bool = False
    alone: bool = False


def width(r):
    return r.randint(2, 4)


def raw(*shape):
    """A random tensor for use as a parameter."""
    return torch.randn(*shape) / shape[-1] ** 0.5


def maps(shape, *widths):
    """Linear maps a, b, c of the last axis, to the given widths."""
    return {name: nn.Linear(shape[-1], w) for name, w in zip("abc", widths, strict=False)}


def gate(function, kinds=ANY):
    """A function of the input and of two linear maps a and b that keep its shape."""
    return Piece(kinds, lambda r, s: Op(function, **maps(s, s[-1], s[-1])))


def mapped(function, kinds=ANY):
    """A function of one linear map a that keeps the shape, and of the input."""
    return Piece(kinds, lambda r, s: Op(function, **maps(s, s[-1])))


def conv2d(r, s, kernel=3, **options):
    return nn.Conv2d(s[0], width(r), kernel, **{"padding": 1, "bias": r.random() < 0.7, **options})


def conv_padded(r, s):
    return conv2d(r, s, padding_mode=r.choice(["circular", "circular", "reflect", "replicate"]))


def conv_transposed(r, s):
    return (nn.ConvTranspose1d, nn.ConvTranspose2d)[len(s) - 2](
        s[0], 2, 3, r.choice([1, 2]), padding=1
    )


def layer_norm(r, s):
    return nn.LayerNorm(s[-r.randint(1, len(s)) :])


def instance_norm(r, s):
    return (nn.InstanceNorm1d, nn.InstanceNorm2d)[len(s) - 2](s[0], affine=True)


def batch_norm(r, s):
    norm = nn.BatchNorm2d(s[0]) if len(s) == IMAGE else nn.BatchNorm1d(s[0])
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm


def normed_tokens(r, s):
    """Positions of an image as tokens: the cotangent of the norm comes back transposed."""
    norm = r.choice([batch_norm, instance_norm])(r, s)
    return Op(lambda m, x: m.norm(x).flatten(2).mT, norm=norm)


def cosine(m, x):
    """Away from the zero vector, where a norm has no derivative."""
    return F.linear(F.normalize(x + 0.1, dim=-1), F.normalize(m.weight, dim=-1))


def flattened(m, x):
    """The batch and the time axis as one."""
    return m.a(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def inplace(m, x):
    h = m.a(x)
    h += m.bias
    h.mul_(0.7)
    return m.b(h.relu_())


def intake(r, s):
    """A first step that changes the network's own input."""
    functions = [
        lambda m, x: m.a(x.add_(0.3)),
        lambda m, x: m.a(x.clamp_(-1.2, 1.2)),
        lambda m, x: m.a(x.mul_(m.s)),
    ]
    return Op(r.choice(functions), s=raw(1) + 1, **maps(s, width(r)))


def attention(m, x):
    scores = m.a(x) @ m.b(x).mT / x.shape[-1] ** 0.5
    return scores.softmax(-1) @ m.c(x)


def multihead_attention(r, s, batch_first=True):
    heads = r.choice([h for h in (1, 2) if s[-1] % h == 0])

    def function(m, x):
        x = x if batch_first else x.transpose(0, 1)
        h = m.attention(x, x, x, need_weights=not batch_first)[0]
        return h if batch_first else h.transpose(0, 1)

    return Op(function, attention=nn.MultiheadAttention(s[-1], heads, batch_first=batch_first))


def encoder_layer(r, s):
    options = {"activation": r.choice(["relu", "gelu"]), "norm_first": r.random() < 0.5}
    return nn.TransformerEncoderLayer(s[-1], 1, 3, dropout=0.1, batch_first=True, **options)


def recurrence(kind, size=2):
    """A recurrent layer over the whole sequence; all states."""
    return lambda r, s: Op(lambda m, x: m.layer(x)[0], layer=kind(s[1], size, batch_first=True))


def cell(kind, size=3):
    """A recurrent cell in a Python loop; the last hidden state."""

    def function(m, x):
        h = x.new_zeros(len(x), size)
        state = (h, h) if kind is nn.LSTMCell else h
        for step in x.unbind(1):
            state = m.cell(step, state)
        return state[0] if kind is nn.LSTMCell else state

    return lambda r, s: Op(function, cell=kind(s[1], size))


def loop(m, x):
    h = x.new_zeros(len(x), 3)
    for step in x.unbind(1):
        h = torch.tanh(m.a(step) + m.state(h))
    return h


def lora(r, s):
    k = width(r)
    parts = {"weight": raw(k, s[-1]), "a": raw(k, 1), "b": raw(1, s[-1])}
    return Op(lambda m, x: F.linear(x, m.weight + m.a @ m.b), **parts)


def two_einsums(m, x):
    return torch.einsum("n...i,ij->n...j", torch.einsum("n...i,ij->n...j", x, m.w).tanh(), m.v)


def embedding(r, s, **options):
    return nn.Embedding(VOCABULARY, width(r), **options)


LINEAR = {
    "linear": Piece(ANY, lambda r, s: nn.Linear(s[-1], width(r))),
    "linear_without_bias": Piece(ANY, lambda r, s: nn.Linear(s[-1], width(r), bias=False)),
    "matmul": Piece(ANY, lambda r, s: Op(lambda m, x: x @ m.w + m.b, w=raw(s[-1], 3), b=raw(3))),
    "matmul_from_the_left": Piece(
        SERIES, lambda r, s: Op(lambda m, x: m.w @ x, w=raw(width(r), s[0]))
    ),
    "flattened_batch": mapped(flattened, SERIES),
    "dropout": Piece(ANY, lambda r, s: nn.Sequential(nn.Linear(s[-1], width(r)), nn.Dropout(0.5))),
    "residual": mapped(lambda m, x: x + m.a(torch.tanh(x))),
    "bilinear": Piece(ANY, lambda r, s: Op(lambda m, x: m.a(x, x), a=nn.Bilinear(s[-1], s[-1], 2))),
    "unused": Piece(ANY, lambda r, s: Op(lambda m, x: m.a(x), unused=raw(2), **maps(s, width(r)))),
}
CONVOLUTIONS = {
    "conv1d": Piece(
        SERIES, lambda r, s: nn.Conv1d(s[0], width(r), r.choice([1, 3]), padding="same")
    ),
    "conv2d": Piece(IMAGES, conv2d),
    "conv3d": Piece((VOLUME,), lambda r, s: nn.Conv3d(s[0], 2, (1, 2, 2), padding=(0, 1, 1))),
    "conv_grouped": Piece(
        IMAGES, lambda r, s: nn.Conv2d(s[0], 2 * s[0], 3, padding=1, groups=s[0])
    ),
    "conv_strided": Piece(IMAGES, lambda r, s: conv2d(r, s, stride=2)),
    "conv_dilated": Piece(IMAGES, lambda r, s: conv2d(r, s, (2, 3), dilation=(2, 1))),
    "conv_transposed": Piece((SEQUENCE, IMAGE), conv_transposed),
    "conv_padded": Piece(IMAGES, conv_padded),
    "max_pool": Piece(
        IMAGES, lambda r, s: nn.Sequential(conv2d(r, s, 2), nn.MaxPool2d(2, stride=1))
    ),
    "average_pool": Piece(
        IMAGES, lambda r, s: nn.Sequential(conv2d(r, s), nn.AvgPool2d(2, stride=1))
    ),
}
NORMS = {
    "layer_norm": Piece(ANY, layer_norm),
    "group_norm": Piece(
        (SEQUENCE, IMAGE, VOLUME), lambda r, s: nn.GroupNorm(r.choice([1, s[0]]), s[0])
    ),
    "instance_norm": Piece((SEQUENCE, IMAGE), instance_norm),
    "batch_norm": Piece((VECTOR, SEQUENCE, IMAGE), batch_norm),
    "normed_tokens": Piece(IMAGES, normed_tokens),
    "rms_norm": Piece(ANY, lambda r, s: nn.RMSNorm(s[-1])),
    "normalize": mapped(lambda m, x: F.normalize(m.a(x), dim=-1)),
    "cosine": Piece(ANY, lambda r, s: Op(cosine, weight=raw(3, s[-1]))),
}
EMBEDDINGS = {
    "embedding": Piece((TOKENS,), embedding, first=True),
    "padded_embedding": Piece(
        (TOKENS,), lambda r, s: embedding(r, s, padding_idx=r.randrange(VOCABULARY)), first=True
    ),
    "tied_embedding": Piece(
        (TOKENS,),
        lambda r, s: Op(lambda m, x: m.e(x).tanh() @ m.e.weight.T, e=embedding(r, s)),
        first=True,
    ),
    "position_embedding": Piece(
        SERIES, lambda r, s: Op(lambda m, x: x + m.e(torch.arange(x.shape[1])), e=nn.Embedding(*s))
    ),
    "position_parameter": Piece(ANY, lambda r, s: Op(lambda m, x: x + m.p, p=raw(1, *s))),
    "class_token": Piece(
        SERIES,
        lambda r, s: Op(
            lambda m, x: torch.cat([m.t.expand(len(x), -1, -1), x], 1), t=raw(1, 1, s[1])
        ),
    ),
}
ELEMENTWISE = {
    "scalars": Piece(
        ANY, lambda r, s: Op(lambda m, x: (x + m.b) * m.s + m.c, b=raw(1), s=raw(1) + 1, c=raw(1))
    ),
    "layer_scale": Piece(
        ANY, lambda r, s: Op(lambda m, x: x + m.gamma * m.a(x), gamma=raw(s[-1]), **maps(s, s[-1]))
    ),
    "prelu": Piece(ANY, lambda r, s: nn.PReLU(r.choice([1, s[0]]))),
    "where": gate(lambda m, x: torch.where(m.a(x) > 0, m.a(x), m.b(x))),
    "sort": mapped(lambda m, x: m.a(x).sort(-1).values.cumsum(-1)),
    "maximum": gate(lambda m, x: torch.maximum(m.a(x), m.b(x).amax(-1, keepdim=True))),
    "inplace": Piece(ANY, lambda r, s: Op(inplace, bias=raw(s[-1]), **maps(s, s[-1], s[-1]))),
    "intake": Piece(ANY, intake, first=True),
}
GATES = {
    "glu": Piece(ANY, lambda r, s: nn.Sequential(nn.Linear(s[-1], 2 * width(r)), nn.GLU())),
    "sigmoid_gate": mapped(lambda m, x: x * m.a(x).sigmoid()),
    "hardtanh_gate": mapped(lambda m, x: x * F.hardtanh(2 * m.a(x))),
    "relu6_gate": gate(lambda m, x: m.b(x) * F.relu6(m.a(x) + 3) / 6),
    "mask_gate": mapped(lambda m, x: (x > 0) * m.a(x)),
    "product": gate(lambda m, x: m.a(x) * m.b(x)),
    "quotient": gate(lambda m, x: m.a(x) / (1 + m.b(x).relu())),
    "activation_product": gate(lambda m, x: m.a(x) @ m.b(x).mT @ x / 4, SERIES),
    "experts": gate(lambda m, x: m.a(x).softmax(-1)[..., :1] * m.b(x)),
}
ATTENTION = {
    "attention": Piece(SERIES, lambda r, s: Op(attention, **maps(s, 2, 2, s[-1]))),
    "multihead_attention": Piece(SERIES, multihead_attention),
    "time_first_attention": Piece(
        SERIES, lambda r, s: multihead_attention(r, s, batch_first=False)
    ),
    "encoder_layer": Piece(SERIES, encoder_layer),
}
RECURRENCES = {
    "gru": Piece(SERIES, recurrence(nn.GRU)),
    "lstm": Piece(SERIES, recurrence(nn.LSTM)),
    "gru_cell": Piece(SERIES, cell(nn.GRUCell)),
    "lstm_cell": Piece(SERIES, cell(nn.LSTMCell, 2)),
    "rnn_cell": Piece(SERIES, cell(nn.RNNCell)),
    "loop": Piece(SERIES, lambda r, s: Op(loop, state=nn.Linear(3, 3, bias=False), **maps(s, 3))),
}
DERIVED = {  # weights that are computed from parameters, or used more than once
    "weight_norm": Piece(ANY, lambda r, s: weight_norm(nn.Linear(s[-1], width(r)))),
    "weight_norm_conv": Piece(IMAGES, lambda r, s: weight_norm(conv2d(r, s, 2))),
    "spectral_norm": Piece(ANY, lambda r, s: spectral_norm(nn.Linear(s[-1], width(r)))),
    "orthogonal": Piece(ANY, lambda r, s: orthogonal(nn.Linear(s[-1], s[-1]))),
    "lora": Piece(ANY, lora),
    "masked_weight": Piece(
        ANY,
        lambda r, s: Op(
            lambda m, x: x @ (m.weight * torch.ones_like(m.weight).tril()), weight=raw(s[-1], 3)
        ),
    ),
    "scaled_weight": Piece(
        ANY,
        lambda r, s: Op(lambda m, x: x @ (m.s.exp() * m.weight), s=raw(1), weight=raw(s[-1], 3)),
    ),
    "sliced_weight": Piece(
        ANY, lambda r, s: Op(lambda m, x: (x @ m.w[:-1]).tanh() + m.w[-1], w=raw(s[-1] + 1, 3))
    ),
    "repeated": mapped(lambda m, x: m.a(m.a(m.a(x).tanh()).tanh())),
    "transposed": Piece(
        ANY, lambda r, s: Op(lambda m, x: (x @ m.weight).tanh() @ m.weight.T, weight=raw(s[-1], 3))
    ),
    "einsum": Piece(
        ANY,
        lambda r, s: Op(
            lambda m, x: torch.einsum("n...i,ijk,n...j->n...k", x, m.w, x), w=raw(s[-1], s[-1], 2)
        ),
    ),
    "distance": Piece(
        (VECTOR, SEQUENCE), lambda r, s: Op(lambda m, x: torch.cdist(x, m.c), c=raw(3, s[-1]))
    ),
}
ALONE = {  # networks without any operation that a rule covers
    "einsum_only": Piece(
        (VECTOR, SEQUENCE), lambda r, s: Op(two_einsums, w=raw(s[-1], 3), v=raw(3, 4)), alone=True
    ),
    "recurrence_only": Piece(SERIES, recurrence(nn.GRU, 4), alone=True),
    "sum_only": Piece(
        (VECTOR,),
        lambda r, s: Op(lambda m, x: x @ (m.u + m.v), u=raw(s[-1], 6), v=raw(s[-1], 6)),
        alone=True,
    ),
}
PIECES = (
    LINEAR
    | CONVOLUTIONS
    | NORMS
    | EMBEDDINGS
    | ELEMENTWISE
    | GATES
    | ATTENTION
    | RECURRENCES
    | DERIVED
    | ALONE
)
ACTIVATIONS = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "hardtanh": nn.Hardtanh,
    "relu6": nn.ReLU6,
    "relu_inplace": lambda: nn.ReLU(inplace=True),
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "sin": lambda: Op(lambda m, x: x.sin()),
    "softmax": lambda: nn.Softmax(-1),
}
HEADS = {
    "linear": nn.Linear,
    "without_bias": lambda d, c: nn.Linear(d, c, bias=False),
    "matmul": lambda d, c: Op(lambda m, x: x @ m.w, w=raw(d, c)),
    "fixed": lambda d, c: nn.Linear(d, c).requires_grad_(False),
    "weight_norm": lambda d, c: weight_norm(nn.Linear(d, c)),
}
# locally linear in the input but for gates, which may saturate: a network of these alone invites a
# shortcut
PIECEWISE_GATES = ["hardtanh_gate", "relu6_gate", "mask_gate", "product", "quotient"]
PIECEWISE = [
    *PIECEWISE_GATES,
    *(
        "linear",
        "linear_without_bias",
        "matmul",
        "dropout",
        "batch_norm",
        "position_parameter",
        "scalars",
    ),
    "layer_scale",
    *CONVOLUTIONS,
]
PIECEWISE_ACTIVATIONS = list(ACTIVATIONS)[:5]
