"""The exceptions of the package, and the exit codes by which programs tell them apart."""

import errno

REFUSED = 2  # the same command would end in the same way
PASSING = 75  # a problem of the moment (EX_TEMPFAIL): the same command may work later
INTERRUPTED = 130  # asked to stop
# errors of a system that is busy or full for the moment
OF_THE_MOMENT = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EAGAIN),
    *(errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT),
)


class NtkMarglikError(Exception):
    """A problem the user can fix: the message says what was expected, what came, and the fix."""


class PassingProblem(NtkMarglikError):
    """A problem of the moment, as no room on a disk: the same command may work later."""


def of_system(error: OSError, message: str) -> NtkMarglikError:
    """An error of the system in our words, as one that passes if it may."""
    kind = PassingProblem if error.errno in OF_THE_MOMENT else NtkMarglikError
    return kind(message)
