"""How a program ends: its exit code, and what it says if something the user can mend went wrong."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from asdl_marglik.errors import CurvatureError, RanksError
from ntkmarglik.errors import (
    INTERRUPTED,
    PASSING,
    REFUSED,
    NtkMarglikError,
    PassingProblem,
    of_system,
)
from ntkmarglik.learn.distributed import leave_others, rank


def exit_code(program: Callable[[], object], interrupted: str = "interrupted") -> int:
    """Run a program and say in a sentence why it did not come to its end, if it did not.

    0 if it ends well, REFUSED after an error that it would meet again, PASSING after one that it
    may not, INTERRUPTED after an interrupt.
    """
    code = _run(program, interrupted)
    if code:
        leave_others(code)
    return code


def _run(program: Callable[[], object], interrupted: str) -> int:
    try:
        with explained():
            program()
    except (PassingProblem, RanksError) as error:
        _say(error)
        return PASSING
    except (NtkMarglikError, CurvatureError) as error:
        _say(error)
        return REFUSED
    except KeyboardInterrupt:
        if _number() == 0:
            print(interrupted, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        # what is flushed at exit has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Errors of the system, as those of this package."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.strerror is None:  # of a library, which may mean anything by it
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        raise of_system(error, f"{where}{error.strerror}.") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise PassingProblem(
            "The memory is used up. Close other programs or raise the limit of this one, or take "
            "smaller blocks, batches or networks (--subset, --outputs, --batch-size)."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory; those of torch on a CPU have no class."""
    if isinstance(error, MemoryError):
        return True
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = ("can't allocate memory", "not enough memory", "bad_alloc", "Cannot allocate memory")
    return any(word in str(error) for word in words)


def _say(error: Exception) -> None:
    where = "" if _number() == 0 else f" on rank {_number()}"
    print(f"error{where}: {error}", file=sys.stderr)


def _number() -> int:
    """The rank of this process; the first one if its number is what is wrong."""
    try:
        return rank()
    except NtkMarglikError:
        return 0
