"""Which operations use which weights: recorded while the model runs, without touching its modules.

A torch-function mode sees every torch call that receives a weight tensor. Calls that a rule
understands become a `Use` (the operation's input and the place of its output in the autograd
graph); a weight that meets any other call is `opaque` and is left to the per-sample path. Working
on operations instead of modules covers raw parameters, tied weights, modules called several times
and `nn.MultiheadAttention` alike, and leaves no hook behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from asdl_marglik.errors import CurvatureError
from asdl_marglik.rules import Call, Rule, rule_for
from asdl_marglik.watch import images
from asdl_marglik.watch.differentiable import TwiceDifferentiable, substitute


@dataclass
class Use:
    """One call of an operation with weights among its arguments.

    Args:
        rule: of the operation.
        call: its arguments, sorted by meaning.
        names: for each role in the operation ("weight", "bias"), the name of the parameter.
        edge: place of the output in the graph, before any in-place operation on the output.
        shape: of the output.
        version: how often the input had been written to at the time of the call.
        output: its values; None except while planning.
    """

    rule: Rule
    call: Call
    names: dict[str, str]
    edge: GradientEdge | None
    shape: torch.Size
    version: int
    output: Tensor | None = None

    @property
    def input(self) -> Tensor | None:
        """The operation's input; an error if it was overwritten after the call."""
        tensor = self.call.input
        if tensor is not None and tensor._version != self.version:
            raise CurvatureError(
                f"the input of {self.rule.name} (parameters {list(self.names.values())}) was "
                "modified in place after it was used; use the out-of-place operation there"
            )
        return tensor

    def without_graph(self) -> Use:
        """The same use without the tensors and the graph of its pass."""
        return replace(self, call=replace(self.call, input=None), edge=None)


class Recorder(TwiceDifferentiable):
    """Context in which a forward pass is recorded: its uses of weights, and which are opaque.

    Args:
        weights: the weights to watch, by name.
        keep_outputs: whether uses hold copies of their outputs (for the planner).
        repeated: numbers of uses that compute the same for all data and whose outputs [1, ...]
            (of positional embeddings) are repeated for each of them, so that each datum has a
            cotangent of its own.
        batch: inputs of the network, for the repeated outputs.
        inputs_only: gradients will be asked for in the network's inputs, and in no weight.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        keep_outputs: bool = False,
        repeated: Collection[int] = (),
        batch: int = 0,
        inputs_only: bool = False,
    ):
        super().__init__()
        self._names = {id(tensor): name for name, tensor in weights.items()}
        self._keep_outputs = keep_outputs
        self._repeated = repeated
        self._batch = batch
        self._inputs_only = inputs_only
        self.uses: list[Use] = []  # in order of execution
        self.opaque: set[str] = set()  # weights in calls that no rule understands
        self.seen: set[str] = set()  # weights in any call

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        touched = {id(t) for t in _tensors((args, kwargs)) if id(t) in self._names}
        if not touched:
            return self._operation(func)(*args, **kwargs)
        rule = rule_for(func)
        call = rule.bind(func, args, kwargs, touched) if rule is not None else None
        if call is None and _is_composite(func):
            with self:  # look inside: rules know the operations it is made of
                return _without_override_check(func)(*args, **kwargs)
        result = self._operation(func)(*args, **kwargs)
        outputs = [t for t in _tensors(result) if t.requires_grad]
        if not outputs:  # a query such as `.shape` or `.dtype`
            return result
        weights = {self._names[i] for i in touched}
        self.seen.update(weights)
        names = self._weights_in(call)
        self.opaque.update(weights - set(names.values()))
        if names:
            assert rule is not None and call is not None
            if len(self.uses) in self._repeated:
                call = replace(call, input=self._for_all_data(call.input))
                result = self._for_all_data(result)
            self.uses.append(self._use(rule, call, names, result))
        return result

    def _operation(self, func: Callable) -> Callable:
        """What is called in place of a function of torch."""
        return images.conv2d if self._inputs_only and func is F.conv2d else substitute(func)

    def _for_all_data(self, t: Tensor | None) -> Tensor | None:
        """[1, ...] -> [batch, ...], without a copy."""
        return t if t is None or len(t) != 1 else t.expand(self._batch, *t.shape[1:])

    def _weights_in(self, call: Call | None) -> dict[str, str]:
        """The names of the watched weights in a call that a rule understands, by role."""
        if call is None:
            return {}
        watched = [(role, id(t)) for role, t in call.weights.items() if id(t) in self._names]
        return {role: self._names[i] for role, i in watched}

    def _use(self, rule: Rule, call: Call, names: dict[str, str], output: Tensor) -> Use:
        """The record of one call."""
        return Use(
            rule,
            call,
            names,
            edge=get_gradient_edge(output),
            shape=output.shape,
            version=0 if call.input is None else call.input._version,
            output=output.detach().clone() if self._keep_outputs else None,
        )


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
    """Whether a function of torch is written in Python, of other functions of torch."""
    return isinstance(func, FunctionType) and func.__module__ == "torch.nn.functional"


_COMPOSITES: dict[Callable, Callable] = {}


def _without_override_check(func: Callable) -> Callable:
    """The same Python function, minus the check that would hand it straight back to the mode."""
    if func in _COMPOSITES:
        return _COMPOSITES[func]
    assert isinstance(func, FunctionType)
    scope = dict(func.__globals__)
    for name in func.__globals__:
        if name.startswith("has_torch_function"):
            scope[name] = lambda *_: False
    copy = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    _COMPOSITES[func] = copy
    return copy
