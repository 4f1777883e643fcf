"""Networks of three convolutions: `mininet` of the illustrations and the LeNet-like `cnn`.

Both were made for 28x28 pixels, where their convolutions without padding end in one pixel. What is
left on larger images is flattened. Below 28 pixels (digits 8x8, USPS 16x16) the first two
convolutions are 3x3 with padding, and the last one covers what the two poolings leave, up to 5x5.
"""

from torch import nn

from ntkmarglik.errors import NtkMarglikError

SMALL = 28


def three_convs(
    input_shape: tuple[int, int, int],
    widths: tuple[int, int, int],
    middle: int,
    act: type[nn.Module],
) -> tuple[list[nn.Module], int]:
    """Conv, act, pool, conv, act, pool, conv, flatten, act; and how many features come out of it.

    middle: kernel of the second convolution on images of at least 28 pixels.
    """
    c, h, w = input_shape
    side = min(h, w)
    if side < 4:
        raise NtkMarglikError(
            "mininet and cnn halve the image twice and need at least 4x4 pixels, but got "
            f"{h}x{w}. Use --model mlp."
        )
    small = side < SMALL
    pad = 1 if small else 0
    k1, k2, k3 = (3, 3, min(5, side // 4)) if small else (5, middle, 5)
    a, b, d = widths
    layers = [
        nn.Conv2d(c, a, k1, padding=pad),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(a, b, k2, padding=pad),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(b, d, k3),
        nn.Flatten(),
        act(),
    ]

    def left(size: int) -> int:
        size = (size + 2 * pad - k1 + 1) // 2
        return (size + 2 * pad - k2 + 1) // 2 - k3 + 1

    return layers, d * left(h) * left(w)


def mininet(input_shape: tuple[int, int, int], n_classes: int) -> nn.Module:
    """Convolutions to 8, 16 and 32 channels (kernels 5, 3, 5), rectifiers, a linear layer."""
    layers, n_features = three_convs(input_shape, (8, 16, 32), 3, nn.ReLU)
    return nn.Sequential(*layers, nn.Linear(n_features, n_classes))


def cnn(input_shape: tuple[int, int, int], n_classes: int) -> nn.Module:
    """LeNet: convolutions to 6, 16 and 120 channels, linear layers of 84 and C units.

    tanh on gray images, rectifiers on colour; the middle kernel is 5 from 32 pixels on, so that
    there too one pixel is left.
    """
    act: type[nn.Module] = nn.Tanh if input_shape[0] == 1 else nn.ReLU
    layers, n_features = three_convs(
        input_shape, (6, 16, 120), 5 if min(input_shape[1:]) >= 32 else 3, act
    )
    return nn.Sequential(*layers, nn.Linear(n_features, 84), act(), nn.Linear(84, n_classes))
