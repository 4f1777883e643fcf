"""Train an image classifier and learn its hyperparameters on the same data: see --help."""

import sys

from ntkmarglik.programs.classify.command import main

if __name__ == "__main__":
    sys.exit(main())
