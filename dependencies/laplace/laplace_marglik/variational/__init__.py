"""Variational objectives: the data-emphasised ELBO and what it is made of."""
