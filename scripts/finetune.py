"""Fine-tune a pretrained network and learn how far its weights may move: see --help."""

import sys

from ntkmarglik.programs.finetune.command import main

if __name__ == "__main__":
    sys.exit(main())
