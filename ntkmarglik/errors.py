"""The one exception of the package."""


class NtkMarglikError(Exception):
    """A problem the user can fix: the message says what was expected, what came, and the fix."""
