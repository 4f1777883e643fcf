"""Bounds of the evidence on a grid of hyperparameter values, at one trained network."""
