"""The one exception base of the package, and a signal between its layers."""


class CurvatureError(Exception):
    """Something about the model or the data makes the curvature undefined; the message names it and
    the fix.
    """


class PrecisionLost(Exception):
    """Statistics in single precision leave too much of a log-determinant to rounding: compute them
    in double.
    """
