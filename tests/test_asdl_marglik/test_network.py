"""Models as they come: wrapped, called by keywords, with several outputs."""

import warnings
from collections import namedtuple

import pytest
import torch
from torch import nn

from asdl_marglik import (
    CurvatureError,
    Network,
    chosen_output,
    evaluating,
    full_precision,
    make_plan,
    plain,
    run,
    trainable,
)

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


class TwoInputs(nn.Module):
    """Keywords in, several outputs."""

    def __init__(self, kind="dict"):
        super().__init__()
        self.net = mlp()
        self.kind = kind

    def forward(self, first, second=None, **options):
        f = self.net(first if second is None else first + second)
        made = {
            "dict": {"loss": f.sum(), "logits": f, "other": 2 * f},
            "tuple": (f, 2 * f),
            "fields": namedtuple("Outputs", ["hidden", "logits"])(2 * f, f),
            "no tensor": {"loss": 1.0},
        }
        return made[self.kind]


@pytest.mark.parametrize("root", [nn.Linear(4, 3).double(), mlp()], ids=["a layer", "layers"])
def test_a_view_owns_nothing(root):
    view = Network(root)
    assert [n for n, _ in view.named_parameters()] == [n for n, _ in root.named_parameters()]
    assert {*view.modules()} == {*root.modules()}
    before = root(X)
    replaced = {name: torch.zeros_like(p) for name, p in root.named_parameters()}
    assert not run(view, X, replaced).any()
    assert torch.equal(root(X), before)
    with evaluating(view):
        assert not any(module.training for module in root.modules())
    assert all(module.training for module in root.modules())
    assert Network.of(view) is view and plain(view) is root


@pytest.mark.parametrize("kind", ["dict", "tuple", "fields"])
def test_keywords_in_and_several_outputs(kind):
    model = TwoInputs(kind)
    batch = {"first": X, "second": X.flip(0)}
    torch.testing.assert_close(run(model, batch), model.net(X + X.flip(0)))
    plan = make_plan(model, trainable(model), batch)
    assert plan.output_shape == (3,) and not plan.persample


def test_an_output_by_name_or_place():
    f = mlp()(X)
    assert torch.equal(run(Network(TwoInputs(), "other"), {"first": X}), 2 * f)
    assert torch.equal(run(Network(TwoInputs("tuple"), 1), {"first": X}), 2 * f)
    assert torch.equal(run(Network(TwoInputs("fields"), "hidden"), {"first": X}), 2 * f)


@pytest.mark.parametrize(
    "result, output, words",
    [
        ({"loss": 1.0}, None, r"dict with the entries \['loss'\].*output="),
        ({"a": X}, "b", r"dict with the entries \['a'\]"),
        ((X,), 3, "tuple of 1 entries"),
        (X, "logits", "got Tensor"),
        ("text", None, "got str"),
        (None, None, "got NoneType.*wrap the model"),
    ],
)
def test_outputs_that_are_not_there(result, output, words):
    with pytest.raises(CurvatureError, match=words):
        chosen_output(result, output)


def test_a_mapping_is_one_argument_where_the_forward_says_so():
    class OfMapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, batch):
            return self.net(batch["a"] - batch["b"])

    batch = {"a": X, "b": X / 2}
    model = OfMapping()
    assert torch.equal(run(model, batch), model.net(X - X / 2))


def test_entries_that_the_forward_does_not_take_are_named():
    class Strict(TwoInputs):
        def forward(self, first, second=None):
            return self.net(first)

    with pytest.raises(CurvatureError, match=r"takes first, second.*leave out or rename \['idx'\]"):
        run(Strict(), {"first": X, "idx": X})


# ------------------------------------------------------------------------------------- wrappers


def test_compiled_models_are_watched_as_they_were_written():
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    assert (
        [*trainable(compiled)]
        == [*trainable(model)]
        == ["0.weight", "0.bias", "2.weight", "2.bias"]
    )
    with warnings.catch_warnings(), evaluating(compiled):
        warnings.simplefilter("error")
        plan = make_plan(compiled, trainable(compiled), X)
    assert plan.rules == make_plan(model, trainable(model), X).rules
    assert Network(compiled).given is compiled and Network(compiled).model is model


def test_parts_compiled_in_place_are_watched_too():
    model = mlp()
    model[0].compile(backend="eager")
    with evaluating(model):
        plan = make_plan(model, trainable(model), X)
    assert not plan.persample


def test_models_that_are_distributed(tmp_path):
    model = mlp()
    assert [*trainable(nn.DataParallel(model))] == [*trainable(model)]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        assert plain(parallel) is model
        assert torch.equal(run(parallel, X), model(X))
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_weights_are_refused():
    class FullyShardedDataParallel(nn.Linear):
        pass

    with pytest.raises(CurvatureError, match=r"sharded.*DistributedDataParallel"):
        plain(FullyShardedDataParallel(2, 2))


def test_a_forward_that_accelerate_has_wrapped_is_looked_through():
    accelerate = pytest.importorskip("accelerate")
    model = mlp().float()
    want = model(X.float())
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    wrapped = prepared.forward
    with full_precision(prepared):
        assert torch.equal(run(prepared, X.float()), want)
    assert prepared.forward == wrapped and not torch.equal(prepared(X.float()), want)


def test_autocast_inside_a_forward_is_refused():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp().float()

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(x)

    model = Half()
    with evaluating(model), pytest.raises(CurvatureError, match="switches autocast on"):
        make_plan(model, trainable(model), X.float())
