"""Whether cotangents are the same for all inputs nearby, read off the autograd graph of one pass.

A network is piecewise linear in its inputs if every operation between them and the outputs is; of a
product, at most one factor may move. Then output cotangents do not depend on the inputs almost
everywhere, and their derivative need not be computed. A tensor moves if it depends on the inputs or
on the output of an operation with weights. The latter counts because the cotangent that such an
output receives from a product is the product's other factor.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node

# names of the autograd nodes of operations that are piecewise linear in all arguments together
_LINEAR = {
    "AccumulateGrad",
    "AdaptiveAvgPool1DBackward0",
    "AdaptiveAvgPool2DBackward0",
    "AdaptiveMaxPool2DBackward0",
    "AddBackward0",
    "AsStridedBackward0",
    "AvgPool2DBackward0",
    "AvgPool3DBackward0",
    "CatBackward0",
    "CloneBackward0",
    "ConstantPadNdBackward0",
    "ExpandBackward0",
    "HardtanhBackward0",
    "LeakyReluBackward0",
    "MaxPool2DWithIndicesBackward0",
    "MaxPool3DWithIndicesBackward0",
    "MeanBackward0",
    "MeanBackward1",
    "NegBackward0",
    "PermuteBackward0",
    "ReluBackward0",
    "RepeatBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "StackBackward0",
    "SubBackward0",
    "SumBackward0",
    "SumBackward1",
    "TBackward0",
    "ThresholdBackward0",
    "TransposeBackward0",
    "UnbindBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
    "WhereBackward0",
}
# products: the arguments of which at most one may move; other arguments are added
_PRODUCTS = {
    "AddmmBackward0": (1, 2),
    "BaddbmmBackward0": (1, 2),
    "BmmBackward0": (0, 1),
    "ConvolutionBackward0": (0, 1),
    "DivBackward0": (0, 1),
    "ImageConvolutionBackward": (0, 1),
    "MmBackward0": (0, 1),
    "MulBackward0": (0, 1),
    "MvBackward0": (0, 1),
    "NativeBatchNormBackward0": (0, 1),
}


def piecewise_linear(outputs: Tensor, sources: Iterable[Node]) -> bool:
    """Whether cotangents on the way from the outputs to the sources are locally constant.

    Args:
        outputs: of the network, with their graph.
        sources: nodes of the inputs, and of the outputs of operations with weights.
    """
    if outputs.grad_fn is None:
        return True
    moving = _moving(outputs.grad_fn, set(sources))
    nodes = [node for node, moves in moving.items() if moves]
    return all(_is_linear(node, moving) for node in nodes)


def _moving(end: Node, sources: set[Node]) -> dict[Node, bool]:
    """For every node behind `end`, whether it depends on a source."""
    moving: dict[Node, bool] = {}
    pending = [end]
    while pending:
        node = pending[-1]
        arguments = [argument for argument, _ in node.next_functions if argument is not None]
        unknown = [argument for argument in arguments if argument not in moving]
        if unknown:
            pending.extend(unknown)
            continue
        pending.pop()
        moving[node] = node in sources or any(moving[argument] for argument in arguments)
    return moving


def _is_linear(node: Node, moving: dict[Node, bool]) -> bool:
    """Whether an operation is piecewise linear in those of its arguments that move."""
    name = node.name().rpartition("::")[2]
    if name in _LINEAR:
        return True
    if name not in _PRODUCTS:
        return False
    if getattr(node, "_saved_training", False):  # normalised by statistics of the batch
        return False
    arguments = [argument for argument, _ in node.next_functions]
    factors = [arguments[i] for i in _PRODUCTS[name] if i < len(arguments)]
    moves = [factor is not None and moving.get(factor, False) for factor in factors]
    if name == "DivBackward0" and moves[-1]:  # not linear in its divisor
        return False
    return sum(moves) <= 1
