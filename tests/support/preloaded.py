"""What a program imports when it comes to it, imported at once.

For processes that are forked often, each of which would import it again.
"""

import importlib
import pkgutil

import asdl_marglik
import laplace_marglik
import ntkmarglik.learn
import ntkmarglik.problem
import ntkmarglik.runs


def preload(program):
    """Import all that a program (classify, grid, finetune) may need."""
    import torch._dynamo  # noqa: F401 - which optimisers import when they are made

    importlib.import_module(f"ntkmarglik.programs.{program}.run")
    for package in (ntkmarglik.learn, ntkmarglik.problem, ntkmarglik.runs):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for library in (asdl_marglik, laplace_marglik):
        for name in library.__all__:
            getattr(library, name)
    ntkmarglik.problem.data.load("digits", "data")
