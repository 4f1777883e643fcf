"""Commands of the runtimes in Figures 1 and 13: one estimate and gradient for every bound.

python scripts/generate_timing_commands.py > scripts/timing_commands.sh    (run them one after the
other)
"""

from commands import Experiment, Scale, print_commands
from generate_bound_commands import estimators

from ntkmarglik.learn.methods import METHODS


def experiments(scale: Scale) -> list[Experiment]:
    """The estimators of the bound experiments but MAP, which estimates nothing; one seed."""
    found = []
    for name, figure in (("prior", "Figure 13"), ("lila", "Figure 1")):
        files = (f"bound-{name}", "timing")
        configs = tuple(
            c for c in estimators(list(files), scale) if METHODS[c.estimator.method].learns()
        )
        found.append(Experiment(f"timing-{name}", files, figure, (0,), configs))
    return found


if __name__ == "__main__":
    print_commands(__doc__, experiments)
