"""Which operations use which weights: recorded while the model runs, without touching its modules.

A torch-function mode sees every torch call that receives a weight tensor. Calls that a rule
understands become a `Use` (the operation's input and the place of its output in the autograd
graph); a weight that meets any other call is `opaque` and is left to the per-sample path. Working
on operations instead of modules covers raw parameters, tied weights, modules called several times
and `nn.MultiheadAttention` alike, and leaves no hook behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from asdl_marglik.errors import CurvatureError
from asdl_marglik.rules import Call, Rule, rule_for
from asdl_marglik.watch.differentiable import TwiceDifferentiable, substitute


@dataclass
class Use:
    """One call of an operation with weights among its arguments."""

    rule: Rule
    call: Call
    names: dict[str, str]  # role in the operation ("weight", "bias") -> parameter name
    edge: GradientEdge | None  # the output, as it was before any in-place operation on it
    shape: torch.Size
    version: int
    output: Tensor | None = None  # kept only while planning

    @property
    def input(self) -> Tensor | None:
        """The operation's input; refuses one that was overwritten after the call."""
        tensor = self.call.input
        if tensor is not None and tensor._version != self.version:
            raise CurvatureError(
                f"the input of {self.rule.name} (parameters {list(self.names.values())}) was "
                "modified in place after it was used; use the out-of-place operation there"
            )
        return tensor

    def without_graph(self) -> Use:
        """The same use, free of the pass's tensors."""
        return replace(self, call=replace(self.call, input=None), edge=None)


class Recorder(TwiceDifferentiable):
    """Context in which a forward pass leaves its `uses` (in order of execution) and its `opaque`
    weights.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, keep_outputs: bool = False):
        super().__init__()
        self._names = {id(tensor): name for name, tensor in weights.items()}
        self._keep_outputs = keep_outputs
        self.uses: list[Use] = []
        self.opaque: set[str] = set()
        self.seen: set[str] = set()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        touched = {id(t) for t in _tensors((args, kwargs)) if id(t) in self._names}
        if not touched:
            return substitute(func)(*args, **kwargs)
        rule = rule_for(func)
        call = rule.bind(func, args, kwargs, touched) if rule is not None else None
        if call is None and _is_composite(func):
            with self:  # look inside: its own calls are what the rules know
                return _without_override_check(func)(*args, **kwargs)
        result = substitute(func)(*args, **kwargs)
        outputs = [t for t in _tensors(result) if t.requires_grad]
        if not outputs:  # a query such as `.shape` or `.dtype`
            return result
        names = (
            {role: self._names[id(t)] for role, t in call.weights.items() if id(t) in touched}
            if call
            else {}
        )
        self.opaque.update({self._names[i] for i in touched} - set(names.values()))
        if call is not None and names:
            assert rule is not None
            self.uses.append(
                Use(
                    rule,
                    call,
                    names,
                    get_gradient_edge(result),
                    result.shape,
                    0 if call.input is None else call.input._version,
                    result.detach().clone() if self._keep_outputs else None,
                )
            )
        self.seen.update(self._names[i] for i in touched)
        return result


def _tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts of arguments."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _is_composite(func: Callable) -> bool:
    return isinstance(func, FunctionType) and func.__module__ == "torch.nn.functional"


_COMPOSITES: dict[Callable, Callable] = {}


def _without_override_check(func: Callable) -> Callable:
    """The same Python function, minus the check that would hand it straight back to the mode."""
    if func not in _COMPOSITES:
        assert isinstance(func, FunctionType)
        checks: Iterable[str] = [
            name for name in func.__globals__ if name.startswith("has_torch_function")
        ]
        scope = {**func.__globals__, **{name: lambda *_: False for name in checks}}
        copy = FunctionType(
            func.__code__, scope, func.__name__, func.__defaults__, func.__closure__
        )
        copy.__kwdefaults__ = func.__kwdefaults__
        _COMPOSITES[func] = copy
    return _COMPOSITES[func]
