"""Networks: shapes, parameter counts, Fixup's start, seeds, refusals."""

import math

import pytest
import torch
from torch import nn

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.models import MODELS, build
from ntkmarglik.problem.models.fixup import Scale, Shift
from ntkmarglik.problem.models.resnet import BasicBlock, Bottleneck
from ntkmarglik.problem.models.wrn import WideBlock

SMALL = {
    "mlp": {},
    "cnn": {},
    "mininet": {},
    "resnet": {"width": 4},
    "resnet50": {"width": 4},
    "wrn": {"width": 1},
}
SMALL["resnet_norm"] = {"width": 6}
SHAPES = [(1, 8, 8), (1, 16, 16), (1, 28, 28), (3, 32, 32), (3, 64, 64), (2, 9, 21)]


def n_parameters(model):
    return sum(p.numel() for p in model.parameters())


def random_images(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def shake(model):
    """Move the zeros of Fixup, so that every parameter matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def test_every_model_is_tried_here():
    assert set(SMALL) == set(MODELS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_output_shape_on_any_sensible_input(name, shape):
    model = build(name, shape, 7, **SMALL[name])
    assert model(random_images(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("name", MODELS)
def test_each_output_depends_on_its_own_input_and_every_parameter_gets_a_gradient(name):
    model = shake(build(name, (3, 32, 32), 5, **SMALL[name])).double()
    x = random_images(3, 3, 32, 32).double()
    out = model(x)
    torch.testing.assert_close(out[1:2], model(x[1:2]))
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_no_inplace_activations(name):
    assert not any(
        getattr(m, "inplace", False) for m in build(name, (3, 32, 32), 5, **SMALL[name]).modules()
    )


@pytest.mark.parametrize(
    ("name", "shape", "n_classes", "options", "count"),
    [
        # 14,538: the paper's "about 16,000"
        ("mininet", (1, 28, 28), 10, {}, 208 + 1168 + 12832 + 330),
        ("mininet", (3, 32, 32), 10, {}, 608 + 1168 + 12832 + 1290),
        ("mininet", (1, 8, 8), 10, {}, 80 + 1168 + 2080 + 330),
        ("mlp", (1, 28, 28), 10, {}, 785 * 1000 + 10010),
        ("cnn", (1, 28, 28), 10, {}, 156 + 880 + 48120 + 10164 + 850),
        ("cnn", (3, 32, 32), 10, {}, 456 + 2416 + 48120 + 10164 + 850),
        ("resnet", (3, 32, 32), 10, {}, 688_356),
        ("resnet", (3, 64, 64), 200, {"depth": 50}, 2_279_666),
        ("wrn", (3, 32, 32), 10, {}, 2_745_306),
        ("resnet50", (3, 64, 64), 200, {}, 23_840_490),
    ],
)
def test_parameter_counts(name, shape, n_classes, options, count):
    assert n_parameters(build(name, shape, n_classes, **options)) == count


def test_layers_of_the_published_networks():
    kernels = [
        m.kernel_size[0]
        for m in build("cnn", (3, 32, 32), 10).modules()
        if isinstance(m, nn.Conv2d)
    ]
    assert kernels == [5, 5, 5]
    assert any(isinstance(m, nn.Tanh) for m in build("cnn", (1, 28, 28), 10).modules())
    assert any(isinstance(m, nn.ReLU) for m in build("cnn", (3, 32, 32), 10).modules())
    for depth in (10, 18, 26):
        convs = [
            m
            for m in build("resnet", (3, 32, 32), 10, depth=depth).modules()
            if isinstance(m, nn.Conv2d)
        ]
        assert len(convs) == depth - 1  # and one linear layer
        assert sorted({m.out_channels for m in convs}) == [16, 32, 64, 128]
    convs = [
        m for m in build("resnet50", (3, 32, 32), 10, width=8).modules() if isinstance(m, nn.Conv2d)
    ]
    assert len(convs) == 49 + 4 and convs[0].out_channels == 2  # four shortcuts
    convs = [m for m in build("wrn", (3, 32, 32), 10).modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == 16 and sorted({m.out_channels for m in convs}) == [16, 64, 128, 256]


# --- Fixup


def test_shift_and_scale_are_scalars_that_start_as_identity():
    x = random_images(2, 3, 4, 4)
    shift, scale = Shift(), Scale()
    assert torch.equal(shift(x), x) and torch.equal(scale(x), x)
    with torch.no_grad():
        shift.shift.fill_(0.5)
        scale.scale.fill_(-2.0)
    assert torch.equal(shift(x), x + 0.5) and torch.equal(scale(x), x * -2.0)
    assert shift.shift.shape == scale.scale.shape == (1,)


@pytest.mark.parametrize(
    "block", [BasicBlock(6, 6, 1, 8), Bottleneck(24, 6, 1, 8), WideBlock(6, 6, 1, 8)]
)
def test_residual_blocks_start_as_the_identity(block):
    # not negative, so rectifiers pass it
    x = random_images(2, 24 if isinstance(block, Bottleneck) else 6, 8, 8)
    torch.testing.assert_close(block(x), x)


@pytest.mark.parametrize(
    ("block", "stride"), [(BasicBlock(4, 8, 2, 8), 2), (BasicBlock(4, 8, 1, 8), 1)]
)
def test_the_shortcut_of_a_wider_basic_block_subsamples_and_pads_with_zeros(block, stride):
    x = random_images(2, 4, 7, 7)
    out = block(x)
    torch.testing.assert_close(out[:, :4], x[:, :, ::stride, ::stride])
    assert out[:, 4:].abs().sum() == 0


@pytest.mark.parametrize("name", ["resnet", "resnet50", "wrn"])
def test_fixup_networks_start_at_zero_with_zero_last_layers(name):
    model = build(name, (3, 32, 32), 10, **SMALL[name])
    assert model(random_images(2, 3, 32, 32)).abs().max() == 0
    for block in model.stages:
        last = block.conv3 if isinstance(block, Bottleneck) else block.conv2
        assert last.weight.abs().max() == 0
    assert model.head.weight.abs().max() == 0 and model.head.bias.abs().max() == 0


@pytest.mark.parametrize(
    ("name", "n_blocks", "power"), [("resnet", 8, -0.5), ("wrn", 6, -0.5), ("resnet50", 16, -0.25)]
)
def test_scale_of_the_first_convolutions(name, n_blocks, power):
    model = build(name, (3, 32, 32), 10, width=0 if name != "resnet50" else 32)
    assert len(model.stages) == n_blocks
    weight = model.stages[-1].conv1.weight
    expected = math.sqrt(2 / (weight.shape[0] * weight.shape[2] ** 2)) * n_blocks**power
    assert weight.std().item() == pytest.approx(expected, rel=0.02)


def test_only_fixup_scalars_have_size_one():
    model = build("resnet", (3, 32, 32), 10)
    scalars = {
        id(p) for m in model.modules() if isinstance(m, Shift | Scale) for p in m.parameters()
    }
    assert {id(p) for p in model.parameters() if p.numel() == 1} == scalars and len(
        scalars
    ) == 5 * 8 + 2


# --- seeds


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_fixes_the_weights_and_leaves_the_global_generator_alone(name):
    def weights(seed):
        return nn.utils.parameters_to_vector(
            build(name, (1, 28, 28), 10, seed=seed, **SMALL[name]).parameters()
        )

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = weights(7)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, weights(7)) and not torch.equal(first, weights(8))
    generator = torch.Generator().manual_seed(3)
    drawn, next_drawn = weights(generator), weights(generator)
    assert not torch.equal(drawn, next_drawn)
    assert torch.equal(drawn, weights(torch.Generator().manual_seed(3)))


# --- refusals


def test_unknown_model_gets_a_suggestion():
    with pytest.raises(NtkMarglikError, match=r"Unknown model 'resnet5'. Did you mean 'resnet50?'"):
        build("resnet5", (3, 32, 32), 10)


@pytest.mark.parametrize(("depth", "nearest"), [(20, 18), (0, 10), (48, 50), (-5, 10)])
@pytest.mark.parametrize("name", ["resnet", "resnet_norm"])
def test_impossible_depth_names_the_nearest(name, depth, nearest):
    with pytest.raises(NtkMarglikError, match=f"8n \\+ 2 .* is {depth}. Nearest is {nearest}"):
        build(name, (3, 32, 32), 10, depth=depth)


@pytest.mark.parametrize("name", ["mininet", "cnn"])
def test_images_too_small_to_halve_twice(name):
    assert build(name, (1, 4, 4), 3)(random_images(2, 1, 4, 4)).shape == (2, 3)
    with pytest.raises(NtkMarglikError, match="at least 4x4 pixels, but got 3x9"):
        build(name, (1, 3, 9), 3)


def test_impossible_shapes_and_widths():
    with pytest.raises(NtkMarglikError, match=r"\(28, 28\) and 10"):
        build("mlp", (28, 28), 10)
    with pytest.raises(NtkMarglikError, match=r"at least 1, but got .* and 0"):
        build("mlp", (1, 28, 28), 0)
    with pytest.raises(NtkMarglikError, match="width must be positive"):
        build("mlp", (1, 28, 28), 10, width=-3)
