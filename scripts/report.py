"""Make the page of a run, or compare several in one page: see --help."""

import sys

from ntkmarglik.programs.report.run import main

if __name__ == "__main__":
    sys.exit(main())
