"""The one exception base of the package."""

from asdl_marglik import CurvatureError


class MarglikError(CurvatureError):
    """An evidence cannot be computed from what was given; the message says what was expected, what
    came and the fix.
    """
