"""`python -m ntkmarglik`: the same as the command `ntk-marglik`."""

import sys

from ntkmarglik.programs.main import main

if __name__ == "__main__":
    sys.exit(main())
