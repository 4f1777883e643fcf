"""The one exception base of the package, and its warnings that a program may want to catch."""

from asdl_marglik import CurvatureError


class MarglikError(CurvatureError):
    """An argument or a value cannot be used; the message says what was expected and the fix."""


class NotConverged(UserWarning):
    """A result is further from the solution than asked for; the message says how far."""
