"""Tables of the paper from runs, the published number beside each measured one: see --help."""

import sys

from ntkmarglik.programs.paper.tables import main

if __name__ == "__main__":
    sys.exit(main())
