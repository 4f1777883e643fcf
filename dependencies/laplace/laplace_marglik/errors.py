"""The one exception base of the package."""

from asdl_marglik import CurvatureError


class MarglikError(CurvatureError):
    """An argument or a value cannot be used; the message says what was expected and the fix."""
