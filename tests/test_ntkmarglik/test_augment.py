"""Affine augmentation: the group it draws from, the pictures it makes, the gradient of its
ranges.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.augment import RANGES, AffineAugmentation, generators, stacked_grid


def one_hot(name, value):
    return [value if r == name else 0.0 for r in RANGES]


def random_images(*shape, dtype=torch.float64):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def smooth_images(n, c, side):
    """Pictures that bilinear interpolation follows well, 0 at the border."""
    v, u = torch.meshgrid(*[torch.linspace(-1, 1, side, dtype=torch.float64)] * 2, indexing="ij")
    shift = torch.linspace(-0.2, 0.2, n * c, dtype=torch.float64).view(n, c, 1, 1)
    return torch.exp(-8 * ((u - 0.2 - shift) ** 2 + (v + 0.1) ** 2)) * (1 - u**2) * (1 - v**2)


# --- the group


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tx", [[1, 0, 0.4], [0, 1, 0]]),
        ("ty", [[1, 0, 0], [0, 1, 0.4]]),
        ("rotation", [[math.cos(0.4), -math.sin(0.4), 0], [math.sin(0.4), math.cos(0.4), 0]]),
        ("sx", [[math.exp(0.4), 0, 0], [0, 1, 0]]),
        ("sy", [[1, 0, 0], [0, math.exp(0.4), 0]]),
        ("shear", [[math.cosh(0.4), math.sinh(0.4), 0], [math.sinh(0.4), math.cosh(0.4), 0]]),
    ],
)
def test_each_generator_makes_its_one_parameter_group(name, expected):
    matrix = torch.linalg.matrix_exp(0.4 * generators()[RANGES.index(name)])
    torch.testing.assert_close(matrix[:2], torch.tensor(expected))


def test_random_matrices_stay_within_the_ranges():
    augment = AffineAugmentation(500, init=one_hot("rotation", 0.7)).double()
    torch.manual_seed(0)
    theta = augment.matrices(10)
    assert theta.shape == (5000, 2, 3)
    angle = torch.atan2(theta[:, 1, 0], theta[:, 0, 0])
    assert (
        angle.abs().max() <= 0.7
        and angle.max() > 0.69
        and angle.min() < -0.69
        and angle.mean().abs() < 0.02
    )
    torch.testing.assert_close(
        theta[:, :, :2] @ theta[:, :, :2].mT, torch.eye(2).double().expand(5000, 2, 2)
    )


def test_grid_is_that_of_affine_grid():
    theta = torch.randn(2, 3, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = F.affine_grid(theta.flatten(0, 1), [6, 1, 5, 7], align_corners=True)
    torch.testing.assert_close(stacked_grid(theta, 5, 7), expected.reshape(2, 15, 7, 2))


# --- the pictures


@pytest.mark.parametrize(
    "shape", [(3, 1, 28, 28), (2, 3, 32, 32), (2, 2, 8, 11), (1, 1, 1, 1)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_range_is_the_identity(shape, dtype):
    x = random_images(*shape, dtype=dtype)
    out = AffineAugmentation(4, init=0.0)(x)
    assert out.shape == (shape[0], 4, *shape[1:]) and out.dtype == dtype
    torch.testing.assert_close(out, x[:, None].expand(out.shape), atol=1e-5, rtol=1e-5)


def test_samples_are_those_of_each_image_warped_on_its_own():
    x = random_images(3, 2, 9, 9)
    augment = AffineAugmentation(5, init=0.4, flip=True).double()
    torch.manual_seed(3)
    out = augment(x)
    torch.manual_seed(3)
    theta = augment.matrices(3).view(3, 5, 2, 3)
    for i in range(3):
        for a in range(5):
            grid = F.affine_grid(theta[i, a : a + 1], [1, 2, 9, 9], align_corners=True)
            torch.testing.assert_close(
                out[i, a], F.grid_sample(x[i : i + 1], grid, align_corners=True)[0]
            )


def test_pure_rotation_by_a_known_angle(monkeypatch):
    x = random_images(2, 3, 9, 9)
    augment = AffineAugmentation(1, init=one_hot("rotation", math.pi)).double()
    # eps = 2 * 0.75 - 1 = 1/2 of the range pi: a quarter turn
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: torch.full(shape, 0.75, **kw))
    torch.testing.assert_close(augment(x)[:, 0], torch.rot90(x, 1, (2, 3)), atol=1e-6, rtol=0)


def test_pure_translation_by_whole_pixels_brings_in_zeros(monkeypatch):
    x = random_images(1, 1, 9, 9)
    augment = AffineAugmentation(1, init=one_hot("tx", 0.5)).double()
    # eps = 1: 0.5 = 2 of 8 steps
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: torch.ones(shape, **kw))
    expected = torch.zeros_like(x)
    expected[..., :7] = x[..., 2:]
    torch.testing.assert_close(augment(x)[:, 0], expected)


def test_flip_mirrors_half_of_the_samples():
    x = random_images(20, 2, 5, 5)
    torch.manual_seed(0)
    out = AffineAugmentation(50, init=0.0, flip=True).double()(x)
    as_is = (out - x[:, None]).abs().amax((2, 3, 4)) < 1e-9
    mirrored = (out - x.flip(3)[:, None]).abs().amax((2, 3, 4)) < 1e-9
    assert bool((as_is ^ mirrored).all())
    assert abs(mirrored.double().mean() - 0.5) < 0.05
    # per image and per sample
    assert mirrored.double().mean(1).min() > 0 and mirrored.double().mean(0).max() < 1


def test_draws_follow_the_global_generator_and_differ_between_samples():
    x = random_images(2, 1, 8, 8)
    augment = AffineAugmentation(3, init=0.3, flip=True).double()
    torch.manual_seed(1)
    first, second = augment(x), augment(x)
    torch.manual_seed(1)
    assert torch.equal(first, augment(x)) and not torch.equal(first, second)
    assert not torch.allclose(first[:, 0], first[:, 1])


def test_half_precision_inputs_are_sampled_at_full_precision():
    x = random_images(2, 1, 64, 64, dtype=torch.float32)
    augment = AffineAugmentation(2, init=0.2)
    torch.manual_seed(0)
    expected = augment(x)
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(augment(x), expected)
    torch.manual_seed(0)
    half = augment(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.01, rtol=0.01)


# --- the gradient


@pytest.mark.parametrize("flip", [False, True])
def test_gradient_of_the_ranges_by_finite_differences(flip):
    x = smooth_images(3, 2, 17)
    weight = smooth_images(3 * 4, 2, 17).flip(0).view(3, 4, 2, 17, 17) + 0.1
    augment = AffineAugmentation(4, init=[0.1, 0.13, 0.5, 0.2, 0.17, 0.23], flip=flip).double()

    def value():
        torch.manual_seed(11)
        return (augment(x).square() * weight).sum()

    (gradient,) = torch.autograd.grad(value(), augment.eta)
    assert gradient.abs().min() > 1e-3
    step = 1e-6
    for k in range(6):
        with torch.no_grad():
            augment.eta[k] += step
            up = value()
            augment.eta[k] -= 2 * step
            down = value()
            augment.eta[k] += step
        assert ((up - down) / (2 * step)).item() == pytest.approx(
            gradient[k].item(), rel=1e-5, abs=1e-7
        )


def test_gradient_reaches_the_inputs_too():
    x = random_images(1, 1, 6, 6).requires_grad_()
    augment = AffineAugmentation(2, init=0.3).double()
    torch.manual_seed(0)
    assert torch.autograd.grad(augment(x).sum(), x)[0].abs().sum() > 0


def test_only_learned_ranges_get_a_gradient():
    augment = AffineAugmentation(3, learn=("rotation", "shear")).double()
    assert augment.eta.tolist() == pytest.approx([0, 0, 0.05, 0, 0, 0.05])
    augment(random_images(2, 1, 8, 8)).square().sum().backward()
    assert [bool(g != 0) for g in augment.eta.grad] == [False, False, True, False, False, True]


def test_fixed_ranges_act_though_they_are_not_learned():
    augment = AffineAugmentation(3, learn=("tx",), init=one_hot("rotation", 1.0)).double()
    x = random_images(2, 1, 8, 8)
    assert not torch.allclose(augment(x)[:, 0], x)


def test_rotation_is_projected_to_all_angles_and_can_come_back():
    augment = AffineAugmentation(2, init=[5.0, 0, 4.0, 0, 0, 0])
    assert augment.eta.tolist() == pytest.approx([5.0, 0, math.pi, 0, 0, 0])
    with torch.no_grad():
        augment.eta[2] = -3.5
    augment(random_images(2, 1, 8, 8, dtype=torch.float32)).square().sum().backward()
    assert augment.eta.grad[2] != 0  # outside the range the gradient is alive
    augment.project_()
    assert augment.eta[2].item() == pytest.approx(-math.pi)
    assert augment.ranges() == pytest.approx(
        dict(zip(RANGES, [5.0, 0, math.pi, 0, 0, 0], strict=True))
    )


def test_state_is_the_six_ranges_only():
    state = AffineAugmentation(3, init=0.2).state_dict()
    assert list(state) == ["eta"] and state["eta"].shape == (6,)
    other = AffineAugmentation(7)
    other.load_state_dict(state)
    assert other.eta.tolist() == pytest.approx([0.2] * 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, but is 0"),
        ({"samples": 2, "learn": ("rotations",)}, "has 'rotations'. Did you mean 'rotation'?"),
        ({"samples": 2, "init": [0.1, 0.2]}, "one number or six .* has 2"),
    ],
)
def test_impossible_options(options, message):
    with pytest.raises(NtkMarglikError, match=message):
        AffineAugmentation(**options)
