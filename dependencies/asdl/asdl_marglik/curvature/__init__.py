"""Approximations of the curvature: terms of a log-determinant, and the structures made of them."""
