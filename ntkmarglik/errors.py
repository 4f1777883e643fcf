"""The exceptions of the package, and the exit codes by which programs tell them apart."""

REFUSED = 2  # the same command would end in the same way
PASSING = 75  # a problem of the moment (EX_TEMPFAIL): the same command may work later
INTERRUPTED = 130  # asked to stop


class NtkMarglikError(Exception):
    """A problem the user can fix: the message says what was expected, what came, and the fix."""


class PassingProblem(NtkMarglikError):
    """A problem of the moment, as no room on a disk: the same command may work later."""
