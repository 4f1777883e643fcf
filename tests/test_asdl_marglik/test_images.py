"""The gradient of a convolution in images with each as a channel group is the usual gradient."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from asdl_marglik.watch import images
from asdl_marglik.watch.linearity import piecewise_linear

# channels, arguments of the convolution
GEOMETRIES = [
    (1, {}),
    (3, {"padding": 1}),
    (2, {"stride": 2, "padding": (2, 0)}),
    (4, {"stride": (1, 3), "dilation": 2}),
]
TORCHS_OWN = [
    (5, {}),  # more channels
    (2, {"groups": 2}),
    (3, {"padding": "same"}),
]


def arguments(channels, options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, channels, 9, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, channels // options.get("groups", 1), 3, 3, generator=generator)
    return x.requires_grad_(), weight.double(), torch.arange(6.0, dtype=torch.float64)


@pytest.mark.parametrize(("channels", "options"), GEOMETRIES)
def test_values_and_two_derivatives(channels, options):
    x, weight, bias = arguments(channels, options)
    y = images.conv2d(x, weight, bias, **options)
    assert y.grad_fn.name() == "ImageConvolutionBackward"
    theirs = F.conv2d(x, weight, bias, **options)
    torch.testing.assert_close(y, theirs)
    y_bar = torch.randn_like(y).requires_grad_()
    gradients = [torch.autograd.grad(f, x, y_bar, create_graph=True)[0] for f in (y, theirs)]
    torch.testing.assert_close(*gradients)
    again = [torch.autograd.grad(g.square().sum(), y_bar)[0] for g in gradients]
    torch.testing.assert_close(*again)


@pytest.mark.parametrize(("channels", "options"), TORCHS_OWN)
def test_other_convolutions_are_left_to_torch(channels, options):
    x, weight, bias = arguments(channels, options)
    y = images.conv2d(x, weight, bias=bias, **options)
    assert y.grad_fn.name() != "ImageConvolutionBackward"
    torch.testing.assert_close(y, F.conv2d(x, weight, bias, **options))


def test_without_a_gradient_in_the_images_the_weights_have_theirs():
    x, weight, _ = arguments(1, {})
    y = images.conv2d(x.detach(), weight.requires_grad_())
    (ours,) = torch.autograd.grad(y.sum(), weight)
    (theirs,) = torch.autograd.grad(F.conv2d(x.detach(), weight).sum(), weight)
    torch.testing.assert_close(ours, theirs)


def test_weights_made_of_the_images_keep_their_part_of_the_gradient():
    x, weight, _ = arguments(1, {})
    gradients = []
    for convolution in (images.conv2d, F.conv2d):
        y = convolution(x, weight * x.mean())
        gradients += torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(*gradients)


def test_no_image_at_all():
    x = torch.zeros(0, 1, 5, 5, requires_grad=True)
    assert images.conv2d(x, torch.zeros(2, 1, 3, 3)).shape == (0, 2, 3, 3)


def test_it_is_known_to_be_linear():
    x, weight, bias = arguments(1, {})
    y = nn.functional.relu(images.conv2d(x, weight, bias))
    assert piecewise_linear(y, [torch.autograd.graph.get_gradient_edge(x).node])
