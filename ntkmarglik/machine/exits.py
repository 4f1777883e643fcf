"""How a program ends: its exit code, and what it says if something the user can mend went wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from asdl_marglik import CurvatureError
from ntkmarglik.errors import NtkMarglikError
from ntkmarglik.learn.distributed import rank


def exit_code(program: Callable[[], object], interrupted: str = "interrupted") -> int:
    """Run a program: 0 if it ends well, 2 after an error it explains, 130 after an interrupt."""
    try:
        program()
    except (NtkMarglikError, CurvatureError) as error:
        where = "" if rank() == 0 else f" on rank {rank()}"
        print(f"error{where}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if rank() == 0:
            print(interrupted, file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        # what is flushed at exit has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
