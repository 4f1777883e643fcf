"""The one exception base of the package."""


class CurvatureError(Exception):
    """Something about the model or the data makes the curvature undefined; the message names it and the fix."""
