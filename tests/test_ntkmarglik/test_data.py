"""Data sets: real formats on tiny files, transformations, subsets and every way files can be
bad.
"""

import gzip
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_files import random_split, write_idx, write_parquet, write_set

from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.problem.data import DATASETS, digits, load
from ntkmarglik.problem.data.sources import CIFAR_MEAN, CIFAR_STD, SOURCES
from ntkmarglik.problem.data.transforms import VARIANTS, draw_transformations, warp

pytestmark = pytest.mark.filterwarnings("ignore:.*is not the published file")


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that cannot be reached, as on a machine without a network."""

    def refuse(*args, **kwargs):
        raise ConnectionError("no network here")

    hub = SimpleNamespace(
        HfApi=lambda: SimpleNamespace(dataset_info=refuse), hf_hub_download=refuse
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_digits_need_no_files():
    data = load("digits", "/nowhere")
    assert data.x_train.shape == (1437, 1, 8, 8) and data.x_test.shape == (360, 1, 8, 8)
    assert data.y_train.dtype == torch.long and data.n_classes == 10 and data.n_data == 1437
    assert data.input_shape == (1, 8, 8)
    assert data.x_train.min() == 0 and data.x_train.max() == 1
    share = [torch.bincount(y).float() / len(y) for y in (data.y_train, data.y_test)]
    torch.testing.assert_close(share[0], share[1], atol=0.003, rtol=0)  # stratified


def test_digits_are_split_as_by_scikit_learn():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(pixels, labels, test_size=360, stratify=labels, random_state=0)
    (train, train_labels), (test, test_labels) = digits.read_digits()
    for ours, theirs in zip((train, test, train_labels, test_labels), split, strict=True):
        np.testing.assert_array_equal(ours.reshape(theirs.shape), theirs)


def test_digits_are_found_wherever_scikit_learn_has_them(monkeypatch):
    ours = digits.read_digits()
    monkeypatch.setattr(digits, "FILE", "nowhere.csv.gz")
    for split, again in zip(ours, digits.read_digits(), strict=True):
        for array, same in zip(split, again, strict=True):
            np.testing.assert_array_equal(array, same)


def test_digits_split_is_a_partition_of_the_originals():
    from sklearn.datasets import load_digits

    data = load("digits", "")
    ours = torch.cat([data.x_train, data.x_test]).flatten(1) * 16
    originals = torch.from_numpy(load_digits().data).float()
    assert sorted(map(tuple, ours.tolist())) == sorted(map(tuple, originals.tolist()))


def test_registry_has_every_base_with_every_suffix():
    assert len(DATASETS) == 7 * 5 and {"digits", "cifar100_r90", "tinyimagenet_scaled"} <= set(
        DATASETS
    )


@pytest.mark.parametrize("name", ["mnist", "fmnist", "usps"])
@pytest.mark.parametrize("layout", ["idx", "parquet"])
def test_mnist_like_are_read_exactly(tmp_path, name, layout):
    write_set(tmp_path, name, layout)
    data = load(name, tmp_path)
    for split, x, y in (("train", data.x_train, data.y_train), ("test", data.x_test, data.y_test)):
        images, labels = random_split(name, split)
        torch.testing.assert_close(x[:, 0], torch.from_numpy(images) / 255)
        assert y.tolist() == labels.tolist()


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "tinyimagenet"])
def test_colour_sets_are_read_and_normalised(tmp_path, name):
    write_set(tmp_path, name)
    data = load(name, str(tmp_path), dtype=torch.float64)
    source = SOURCES[name]
    images, labels = random_split(name, "test")
    expected = (torch.from_numpy(images).double() / 255 - torch.tensor(source.mean)) / torch.tensor(
        source.std
    )
    torch.testing.assert_close(data.x_test, expected.permute(0, 3, 1, 2), atol=1e-6, rtol=0)
    assert data.y_test.tolist() == labels.tolist() and data.n_classes == source.n_classes
    assert data.x_test.dtype == torch.float64


def test_gray_pictures_in_colour_sets_become_rgb(tmp_path):
    folder = write_set(tmp_path, "cifar10")
    gray = np.full((3, 32, 32), 100, np.uint8)
    write_parquet(folder / "test.parquet", gray, [1, 2, 3])
    x = load("cifar10", tmp_path).x_test
    for c in range(3):
        assert x[:, c].unique().tolist() == pytest.approx(
            [(100 / 255 - CIFAR_MEAN[c]) / CIFAR_STD[c]]
        )


def test_shards_in_the_layout_of_hf_download(tmp_path):
    folder = write_set(tmp_path, "cifar10")
    (folder / "train.parquet").unlink()
    inner = folder / "plain_text"
    inner.mkdir()
    images, labels = random_split("cifar10", "train")
    write_parquet(inner / "train-00000-of-00002.parquet", images[:12], labels[:12])
    with pytest.raises(NtkMarglikError, match=r"1 of the 2 .* number 1 is missing"):
        load("cifar10", tmp_path)
    write_parquet(inner / "train-00001-of-00002-abc.parquet", images[12:], labels[12:])
    assert load("cifar10", tmp_path).y_train.tolist() == labels.tolist()


# --- subsets and transformations


def test_subsets_are_seeded_nested_and_the_same_images_in_every_variant():
    whole = load("digits", "")
    small = load("digits", "", n_data=50, seed=3)
    again = load("digits", "", n_data=50, seed=3)
    larger = load("digits", "", n_data=80, seed=3)
    other = load("digits", "", n_data=50, seed=4)
    assert torch.equal(small.x_train, again.x_train) and torch.equal(
        small.x_train, larger.x_train[:50]
    )
    assert not torch.equal(small.x_train, other.x_train)
    assert torch.equal(small.x_test, whole.x_test)
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(3))[:50]
    for variant in VARIANTS:
        turned = load(f"digits_{variant}", "")
        subset = load(f"digits_{variant}", "", n_data=50, seed=3)
        assert torch.equal(subset.y_train, small.y_train)
        torch.testing.assert_close(subset.x_train, turned.x_train[order])
        assert not torch.allclose(turned.x_train, whole.x_train)


@pytest.mark.parametrize("n_data", [-1, 1438])
def test_impossible_subset(n_data):
    with pytest.raises(
        NtkMarglikError, match=f"1437 training points of digits .* is {n_data}. Choose at most 1437"
    ):
        load("digits", "", n_data=n_data)


def test_loading_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    load("digits_r180", "", n_data=10, seed=1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("variant", "limit"), [("r90", math.pi / 2), ("r180", math.pi)])
def test_rotation_angles_fill_their_range(variant, limit):
    theta = draw_transformations(variant, 20_000, 28, seed=1)
    angle = torch.atan2(theta[:, 1, 0], theta[:, 0, 0])
    assert (
        angle.abs().max() <= limit + 1e-5
        and angle.max() > 0.99 * limit
        and angle.min() < -0.99 * limit
    )
    assert abs(angle.mean()) < 0.02 * limit
    assert not torch.equal(theta, draw_transformations(variant, 20_000, 28, seed=0))
    torch.testing.assert_close(
        theta[:, :, :2] @ theta[:, :, :2].mT, torch.eye(2).expand(20_000, 2, 2)
    )


@pytest.mark.parametrize(("side", "pixels"), [(28, 8), (32, 8), (64, 8), (8, 16 / 7)])
def test_translation_is_up_to_eight_pixels_or_the_same_fraction(side, pixels):
    shift = draw_transformations("translated", 20_000, side, seed=1)[:, :, 2] * (side - 1) / 2
    assert shift.abs().max() <= pixels + 1e-4 and shift.abs().max() > 0.99 * pixels


def test_scaling_is_isotropic_and_up_to_two():
    theta = draw_transformations("scaled", 20_000, 28, seed=1)
    assert torch.equal(theta[:, 0, 0], theta[:, 1, 1])
    assert (
        theta[:, 0, 0].max() <= 2.001
        and theta[:, 0, 0].min() >= 0.499
        and theta[:, 0, 0].log().mean().abs() < 0.02
    )


def test_warp_by_known_matrices():
    x = torch.rand(1, 2, 9, 9, generator=torch.Generator().manual_seed(0))
    quarter = torch.tensor([[[0.0, -1.0, 0.0], [1.0, 0.0, 0.0]]])
    torch.testing.assert_close(warp(x, quarter), torch.rot90(x, 1, (2, 3)), atol=1e-5, rtol=0)
    # sample three pixels further right
    right = torch.tensor([[[1.0, 0.0, 2 * 3 / 8], [0.0, 1.0, 0.0]]])
    expected = torch.zeros_like(x)
    expected[..., :6] = x[..., 3:]
    torch.testing.assert_close(warp(x, right), expected, atol=1e-5, rtol=0)


def test_corners_of_a_rotated_colour_picture_are_black(tmp_path):
    folder = write_set(tmp_path, "cifar10")
    write_parquet(folder / "test.parquet", np.full((8, 32, 32, 3), 255, np.uint8), range(8))
    x = load("cifar10_r180", tmp_path).x_test
    black, white = (
        torch.tensor([(v - m) / s for m, s in zip(CIFAR_MEAN, CIFAR_STD, strict=True)])
        for v in (0, 1)
    )
    torch.testing.assert_close(x.amin((0, 2, 3)), black, atol=1e-4, rtol=0)
    torch.testing.assert_close(x[:, :, 16, 16], white.expand(8, 3), atol=1e-4, rtol=0)


# --- what can go wrong


@pytest.mark.parametrize(
    ("wrong", "right"), [("minst", "mnist"), ("cifar_10", "cifar10"), ("mnist_r60", "mnist_r90")]
)
def test_unknown_name_is_refused_with_a_suggestion(wrong, right):
    with pytest.raises(NtkMarglikError, match=f"Unknown data set '{wrong}'. Did you mean '{right}"):
        load(wrong, "")


@pytest.mark.parametrize("name", list(SOURCES))
def test_absent_and_offline_says_what_to_put_where(tmp_path, no_hub, name):
    source = SOURCES[name]
    with pytest.raises(NtkMarglikError, match="no network here") as caught:
        load(name, tmp_path)
    message = str(caught.value)
    assert str(tmp_path / source.folder) in message
    assert f"hf download {source.repository} --repo-type dataset" in message
    for split in source.splits:
        assert f"{source.splits[split]}.parquet" in message
        assert all(file in message for file in source.idx_files(split))


def test_one_of_two_idx_files_is_missing(tmp_path, no_hub):
    folder = write_set(tmp_path, "mnist")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        NtkMarglikError,
        match=r"t10k-images-idx3-ubyte.gz is there, but t10k-labels-idx1-ubyte.gz is not",
    ):
        load("mnist", tmp_path)


def damaged(kind, good):
    inside = gzip.decompress(good)
    return {
        "truncated": good[: len(good) // 2],
        "flipped": good[: len(good) // 2]
        + bytes([good[len(good) // 2] ^ 255])
        + good[len(good) // 2 + 1 :],
        "empty": b"",
        "not gzip": b"<html>404</html>",
        "short content": gzip.compress(inside[:-5]),
        "short header": gzip.compress(inside[:6]),
        "other header": gzip.compress(b"\x00\x00\x0d\x03" + inside[4:]),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["truncated", "flipped", "empty", "not gzip", "short content", "short header", "other header"],
)
def test_damaged_idx_is_named(tmp_path, kind):
    path = write_set(tmp_path, "usps") / "test-images-idx3-ubyte.gz"
    path.write_bytes(damaged(kind, path.read_bytes()))
    with pytest.raises(
        NtkMarglikError,
        match=r"usps/test-images-idx3-ubyte.gz is not a gzipped IDX .* fetch it again",
    ):
        load("usps", tmp_path)


@pytest.mark.filterwarnings("default:.*is not the published file")
def test_an_idx_file_that_is_not_the_published_one_gives_a_warning(tmp_path):
    write_set(tmp_path, "mnist")
    with pytest.warns(
        UserWarning,
        match=r"train-images-idx3-ubyte.gz is readable but is not the published file \(md5",
    ):
        load("mnist", tmp_path)


def test_files_of_another_set_are_refused(tmp_path):
    folder = write_set(tmp_path, "mnist")
    write_idx(folder / "train-images-idx3-ubyte.gz", np.zeros((30, 16, 16), np.uint8))
    with pytest.raises(
        NtkMarglikError, match=r"28x28 image per label, but holds 30 images of 16x16"
    ):
        load("mnist", tmp_path)
    write_idx(folder / "train-images-idx3-ubyte.gz", np.zeros((29, 28, 28), np.uint8))
    with pytest.raises(NtkMarglikError, match="29 images of 28x28 and 30 labels"):
        load("mnist", tmp_path)
    write_idx(folder / "train-images-idx3-ubyte.gz", np.zeros(30, np.uint8))
    with pytest.raises(NtkMarglikError, match="swapped"):
        load("mnist", tmp_path)


def test_labels_out_of_range(tmp_path):
    folder = write_set(tmp_path, "mnist")
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.full(30, 10, np.uint8))
    with pytest.raises(NtkMarglikError, match=r"labels should be 0 ... 9, but are 10 ... 10"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("content", [b"", b"PAR1 nothing", "half"])
def test_damaged_parquet_is_named(tmp_path, content):
    path = write_set(tmp_path, "cifar10") / "train.parquet"
    path.write_bytes(path.read_bytes()[:5000] if content == "half" else content)
    with pytest.raises(
        NtkMarglikError,
        match=r"cifar10/train.parquet is not a readable Parquet file .* fetch it again",
    ):
        load("cifar10", tmp_path)


def test_parquet_with_other_columns_pictures_or_sizes(tmp_path):
    path = write_set(tmp_path, "cifar100") / "train.parquet"
    images, labels = random_split("cifar100", "train")
    write_parquet(path, images, labels, label="label")
    with pytest.raises(
        NtkMarglikError, match=r"a label column 'fine_label', but has \['img', 'label'\]"
    ):
        load("cifar100", tmp_path)
    write_parquet(path, images[:, :16], labels, label="fine_label")
    with pytest.raises(NtkMarglikError, match=r"row 0 should be 32x32 pixels, but is 16x32"):
        load("cifar100", tmp_path)
    bad = [{"bytes": b"no picture", "path": None}]
    pq.write_table(pa.table({"img": bad, "fine_label": [1]}), path)
    with pytest.raises(
        NtkMarglikError, match=r"train.parquet: the picture in row 0 can't be decoded"
    ):
        load("cifar100", tmp_path)


# --- the real files


@pytest.mark.data
@pytest.mark.skipif(
    "NTKMARGLIK_DATA" not in os.environ, reason="set NTKMARGLIK_DATA to the data root"
)
@pytest.mark.parametrize("name", list(SOURCES))
@pytest.mark.filterwarnings("error")
def test_real_files(name):
    data = load(name, os.environ["NTKMARGLIK_DATA"], n_data=1000, seed=1)
    assert data.input_shape == SOURCES[name].shape and data.n_data == 1000
    mean = data.x_train.mean((0, 2, 3))
    expected = {"mnist": 0.1307, "fmnist": 0.2860, "usps": 0.254}.get(name, 0.0)
    torch.testing.assert_close(
        mean, torch.full_like(mean, expected), atol=0.1 if data.x_train.min() < 0 else 0.02, rtol=0
    )
    assert len(data.y_train.unique()) >= 0.9 * data.n_classes


@pytest.mark.parametrize("labels", [["3", "cat"], [0.5, 1.0], [1, None]], ids=str)
def test_labels_that_are_no_whole_numbers_are_refused(labels, tmp_path):
    path = write_set(tmp_path, "cifar10") / "train.parquet"
    table = pq.read_table(path).slice(0, 2)
    pq.write_table(table.set_column(1, "label", pa.array(labels)), path)
    with pytest.raises(NtkMarglikError, match="labels should be whole numbers, but are"):
        load("cifar10", tmp_path)
