"""The one exception base of the package, and a signal between its layers."""


class CurvatureError(Exception):
    """The model or the data leave the curvature undefined; the message says why and what to do."""


class RanksError(CurvatureError):
    """A rank did not answer: it has died, hangs, or does something else."""


class PrecisionLost(Exception):
    """Rounding of single-precision statistics decides a log-determinant: compute them in double."""
