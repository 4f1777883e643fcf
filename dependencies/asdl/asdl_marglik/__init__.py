"""Differentiable curvature of any torch module: kernels, dense and Kronecker-factored blocks, diagonals."""

from .budget import Arrangement, arrange, free_memory, largest_fitting
from .chunk import Chunk
from .errors import CurvatureError, PrecisionLost
from .fast import ALL, FastPaths
from .kernel import mixed_gram
from .linalg import eigen_root, eigenvalues, log_det_identity_plus, psd_sqrt
from .network import (
    check_finite,
    check_weights,
    checksum,
    copied,
    evaluating,
    full_precision,
    hyperparameters_in,
    map_inputs,
    matches,
    run,
    seeded,
    tensors_of,
    trainable,
)
from .part import Groups, Part, Settled
from .plan import Plan, PlanChanged, make_plan
from .ranks import Ranks, RanksError
from .rules import Call, Rule, register
from .selection import RootRows, Selection
from .sharded import ShardedPasses
from .statistics import Batch, Passes, augmented, statistics
from .structure import STRUCTURES, Problem, Structure, guarantee_of, parts_of

__all__ = [
    "ALL",
    "STRUCTURES",
    "Arrangement",
    "Batch",
    "Call",
    "Chunk",
    "CurvatureError",
    "FastPaths",
    "Groups",
    "Part",
    "Passes",
    "Plan",
    "PlanChanged",
    "PrecisionLost",
    "Problem",
    "Ranks",
    "RanksError",
    "RootRows",
    "Rule",
    "Selection",
    "Settled",
    "ShardedPasses",
    "Structure",
    "arrange",
    "augmented",
    "check_finite",
    "check_weights",
    "checksum",
    "copied",
    "eigen_root",
    "eigenvalues",
    "evaluating",
    "free_memory",
    "full_precision",
    "guarantee_of",
    "hyperparameters_in",
    "largest_fitting",
    "log_det_identity_plus",
    "make_plan",
    "map_inputs",
    "matches",
    "mixed_gram",
    "parts_of",
    "psd_sqrt",
    "register",
    "run",
    "seeded",
    "statistics",
    "tensors_of",
    "trainable",
]
