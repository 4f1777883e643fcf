"""`python -m ntkmarglik.programs.classify`: the same as classification_image.py."""

import sys

from ntkmarglik.programs.classify.command import main

if __name__ == "__main__":
    sys.exit(main())
