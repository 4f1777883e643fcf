"""Run a file of commands as jobs, here or on a SLURM cluster, until every line is done: --help."""

import sys

from ntkmarglik.programs.launch.run import main

if __name__ == "__main__":
    sys.exit(main())
