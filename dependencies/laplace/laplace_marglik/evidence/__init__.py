"""The marginal likelihood of the linearised Laplace approximation, estimated from blocks."""
