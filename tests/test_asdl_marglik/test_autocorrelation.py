"""Moments of patches from an autocorrelation are those of patches side by side."""

import pytest
import torch

from asdl_marglik.rules import autocorrelation
from asdl_marglik.rules.base import Call
from asdl_marglik.rules.conv import _by_feature, _from_feature

# channels, sides of the image, of the kernel, padding
GEOMETRIES = [
    (8, (6, 6), (3, 3), (1, 1)),
    (8, (9, 7), (3, 5), (0, 2)),
    (16, (7, 9), (2, 4), (1, 0)),
    (22, (6, 5), (3, 1), (2, 0)),
    (8, (4, 5), (3, 3), (4, 3)),  # padding beyond the kernel
    (4, (7, 7), (5, 5), (2, 2)),
    (4, (4, 4), (5, 5), (1, 2)),  # a kernel larger than the image
]


def convolution(channels, kernel, padding, stride=1, dilation=1):
    options = {
        "stride": (stride, stride),
        "padding": padding,
        "dilation": (dilation, dilation),
        "transposed": False,
        "output_padding": (0, 0),
        "groups": 1,
    }
    return Call(None, {"weight": torch.empty(3, channels, *kernel)}, options)


@pytest.mark.parametrize(("channels", "sides", "kernel", "padding"), GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_and_their_pull_are_those_of_patches(channels, sides, kernel, padding, dtype):
    generator = torch.Generator().manual_seed(0)
    call = convolution(channels, kernel, padding)
    a = torch.randn(5, 2, channels, *sides, generator=generator, dtype=dtype)
    x = _by_feature(call, a)
    bar = torch.randn(len(x), len(x), generator=generator, dtype=dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(autocorrelation.moment(call, a), x @ x.mT, **tolerance)
    a_bar = _from_feature(call, (bar + bar.mT) @ x, a)
    torch.testing.assert_close(autocorrelation.pull_moment(call, a, bar), a_bar, **tolerance)


def test_rounding_is_that_of_a_matrix_product():
    call = convolution(8, (3, 3), (1, 1))
    a = torch.randn(60, 1, 8, 32, 32, generator=torch.Generator().manual_seed(0))
    x = _by_feature(call, a.double())
    exact = x @ x.mT
    error = autocorrelation.moment(call, a).double() - exact
    off = torch.linalg.matrix_norm(error, 2) / torch.linalg.matrix_norm(exact, 2)
    assert off < 1e-6  # one convolution over all pixels: 2e-5


def test_where_it_applies():
    call = convolution(8, (3, 3), (1, 1))
    images = torch.zeros(20, 1, 8, 8, 8)
    assert autocorrelation.applies(call, images)
    assert not autocorrelation.applies(call, images.double())
    assert not autocorrelation.applies(call, images[:2])  # fewer positions than features
    assert not autocorrelation.applies(call, torch.zeros(1, 1, 8, 128, 128))  # rounding
    for other in (
        convolution(8, (3, 3), (1, 1), stride=2),
        convolution(8, (3, 3), (1, 1), dilation=2),
        convolution(8, (1, 1), (0, 0)),
        convolution(8, (5, 5), (0, 0)),  # most positions are beyond the padding
    ):
        assert not autocorrelation.applies(other, images)
