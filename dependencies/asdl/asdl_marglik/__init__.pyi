"""Differentiable curvature of any torch module: kernels, dense, Kronecker or diagonal blocks."""

from asdl_marglik.curvature.blocks import Granularity, blocks_of
from asdl_marglik.curvature.kernel.gram import mixed_gram
from asdl_marglik.curvature.problem import Groups, Problem
from asdl_marglik.curvature.structure import STRUCTURES, Structure, parts_of, register_structure
from asdl_marglik.curvature.term import Settled, Term
from asdl_marglik.errors import CurvatureError, PrecisionLost, RanksError
from asdl_marglik.functions import (
    HasRoot,
    ggn,
    ggn_blocks,
    ggn_diagonal,
    jacobian_rows,
    kfac_factors,
    ntk,
)
from asdl_marglik.linalg import (
    Conditioning,
    eigen_root,
    eigenvalues,
    log_det_identity_plus,
    pivot_order,
    psd_sqrt,
)
from asdl_marglik.passes.forward import Chunk
from asdl_marglik.passes.graph import GraphChunk
from asdl_marglik.passes.memory import Arrangement, Budget, free_memory
from asdl_marglik.passes.root_rows import RootRows, Selection
from asdl_marglik.passes.shortcuts import ALL, FastPaths
from asdl_marglik.passes.two_passes import Batch, Passes, augmented, statistics
from asdl_marglik.ranks.ranks import Ranks
from asdl_marglik.ranks.sharded_passes import ShardedPasses
from asdl_marglik.rules import Call, Rule, register
from asdl_marglik.watch.model import (
    ONE_AT_A_TIME,
    check_finite,
    check_weights,
    checksum,
    constant_besides,
    copied,
    evaluating,
    full_precision,
    hyperparameters_in,
    map_inputs,
    matches,
    run,
    run_averaged,
    seeded,
    taken,
    tensors_of,
    trainable,
)
from asdl_marglik.watch.network import Network, chosen_output, plain
from asdl_marglik.watch.plan import Plan, PlanChanged
from asdl_marglik.watch.planner import make_plan

__all__ = [
    "ALL",
    "ONE_AT_A_TIME",
    "STRUCTURES",
    "Arrangement",
    "Batch",
    "Budget",
    "Call",
    "Chunk",
    "Conditioning",
    "CurvatureError",
    "FastPaths",
    "Granularity",
    "GraphChunk",
    "Groups",
    "HasRoot",
    "Network",
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
    "Term",
    "augmented",
    "blocks_of",
    "check_finite",
    "check_weights",
    "checksum",
    "chosen_output",
    "constant_besides",
    "copied",
    "eigen_root",
    "eigenvalues",
    "evaluating",
    "free_memory",
    "full_precision",
    "ggn",
    "ggn_blocks",
    "ggn_diagonal",
    "hyperparameters_in",
    "jacobian_rows",
    "kfac_factors",
    "log_det_identity_plus",
    "make_plan",
    "map_inputs",
    "matches",
    "mixed_gram",
    "ntk",
    "parts_of",
    "pivot_order",
    "plain",
    "psd_sqrt",
    "register",
    "register_structure",
    "run",
    "run_averaged",
    "seeded",
    "statistics",
    "taken",
    "tensors_of",
    "trainable",
]
