"""Evaluate bounds of the evidence over a grid of a hyperparameter: see --help."""

import sys

from ntkmarglik.programs.grid.command import main

if __name__ == "__main__":
    sys.exit(main())
