"""Draw the figures of illustrations/ from its small csv files: see --help."""

import sys
from pathlib import Path

from ntkmarglik.programs.paper.draw import main

if __name__ == "__main__":
    sys.exit(main(home=Path(__file__).parent / "illustrations"))
