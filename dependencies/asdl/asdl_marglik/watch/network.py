"""The user's model as a function from inputs to one tensor of outputs, whatever it is called by.

Models come wrapped (`torch.compile`, DistributedDataParallel), take a tensor, a mapping or
keywords, and return a tensor, a tuple or an object with fields. Curvature sees one form of all
these: a module of one argument that returns one tensor, with the parameters and the names of the
plain model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from asdl_marglik.errors import CurvatureError

Inputs = Any  # a tensor or a mapping of tensors, each with a leading batch axis
LOGITS = "logits"  # the field of outputs that is taken where none is named


def plain(model: nn.Module) -> nn.Module:
    """The model without what wraps it to compile or to distribute it; its names have no prefix.

    Args:
        model: the user's model.
    """
    while True:
        if isinstance(model, Network):
            model = model.model
        elif isinstance(model, (DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:  # torch.compile
            model = model.get_submodule("_orig_mod")
        else:
            break
    if type(model).__name__ == "FullyShardedDataParallel":
        raise CurvatureError(
            "the model's weights are sharded (FullyShardedDataParallel), and curvature needs whole "
            "ones; use DistributedDataParallel, or the model before it was sharded"
        )
    return model


class Network(nn.Module):
    """A view of a model: of one argument, with one tensor of outputs.

    It owns nothing: parameters, buffers and submodules are those of the plain model under their own
    names, so that everything done to the view is done to the model.

    Args:
        model: the user's model.
        output: which of several outputs: the name of a field or entry, or a place in a tuple. None
            for `logits` where there are any, else the first tensor.
    """

    model: nn.Module
    given: nn.Module

    def __init__(self, model: nn.Module, output: str | int | None = None):
        super().__init__()
        inner = plain(model)
        # not as submodules, which would change the names
        self.__dict__["model"] = inner
        self.__dict__["given"] = model
        self.output = output
        self._parameters = inner._parameters
        self._buffers = inner._buffers
        self._modules = inner._modules

    @staticmethod
    def of(model: nn.Module, output: str | int | None = None) -> Network:
        """The view of a model; a view stays as it is."""
        return model if isinstance(model, Network) else Network(model, output)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return self.model.named_modules(*args, **kwargs)

    def train(self, mode: bool = True) -> Network:
        self.model.train(mode)
        return self

    def forward(self, x: Inputs) -> Tensor:
        return self._outputs(self.model, x)

    def as_given(self, x: Inputs) -> Tensor:
        """Outputs of the model with its wrappers, for training.

        Args:
            x: inputs [n, ...].
        """
        return self._outputs(self.given, x)

    def _outputs(self, model: nn.Module, x: Inputs) -> Tensor:
        result = model(**x) if self._takes_keywords(x) else model(x)
        return chosen_output(result, self.output)

    def _takes_keywords(self, x: Inputs) -> bool:
        """Whether the entries of a mapping are arguments of the model by name."""
        if not isinstance(x, Mapping):
            return False
        signature = inspect.signature(self.model.forward)
        try:
            signature.bind(**x)
        except TypeError:
            unknown = [name for name in x if name not in signature.parameters]
            if len(unknown) < len(x):
                raise CurvatureError(
                    f"the model's forward takes {_names(signature)}, but the inputs have the "
                    f"entries {list(x)}; leave out or rename {unknown or 'some'}, for example "
                    "in collate_fn"
                ) from None
            return False
        return True


def chosen_output(result: Any, output: str | int | None = None) -> Tensor:
    """The tensor among a model's outputs that the likelihood takes.

    Args:
        result: what the model returned: a tensor, a mapping, an object with fields or a sequence.
        output: as in `Network`.
    """
    if isinstance(result, Tensor) and output is None:
        return result
    if output is None:
        found = _default_output(result)
    else:
        found = _named_output(result, output)
    if isinstance(found, Tensor):
        return found
    raise CurvatureError(
        "the model must return a tensor of outputs [n, ...], or one among others, got "
        f"{_described(result)}; name it with output=, or wrap the model in a module whose forward "
        "returns the tensor that the likelihood takes"
    )


def _default_output(result: Any) -> Any:
    """The logits, or the first tensor."""
    logits = _named_output(result, LOGITS)
    if logits is not None:
        return logits
    entries = result.values() if isinstance(result, Mapping) else result
    if not isinstance(entries, (str, bytes)) and hasattr(entries, "__iter__"):
        return next((entry for entry in entries if isinstance(entry, Tensor)), None)
    return None


def _named_output(result: Any, output: str | int) -> Any:
    """An entry or field by name, or an entry by its place; None if there is none."""
    if isinstance(result, Mapping):
        return result.get(output)
    if isinstance(output, int):
        is_there = isinstance(result, (tuple, list)) and -len(result) <= output < len(result)
        return result[output] if is_there else None
    return None if isinstance(result, Tensor) else getattr(result, output, None)


def _described(result: Any) -> str:
    """What a model returned, for an error message."""
    kind = type(result).__name__
    if isinstance(result, Mapping):
        return f"{kind} with the entries {list(result)}"
    if isinstance(result, (tuple, list)):
        return f"{kind} of {len(result)} entries"
    return kind


def _names(signature: inspect.Signature) -> str:
    return ", ".join(signature.parameters)


def plain_forwards(model: nn.Module) -> dict[nn.Module, Any]:
    """Modules whose forward accelerate has wrapped in autocast, with the forward of before."""
    forwards = {module: module.__dict__.get("_original_forward") for module in model.modules()}
    return {module: forward for module, forward in forwards.items() if forward is not None}


def check_autocast(device: torch.device) -> None:
    """Raise an error where a model has switched autocast on in its own forward."""
    if torch.is_autocast_enabled(device.type):
        raise CurvatureError(
            "the model's forward switches autocast on, and curvature needs the precision of the "
            "weights; call the model inside torch.autocast instead, or give the model before it "
            "was wrapped"
        )
