"""Posteriors around trained weights: diagonal, and by samples."""
