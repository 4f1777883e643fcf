"""Learning: methods, the training loop, evaluation, several processes."""
