"""Train an image classifier and learn its hyperparameters."""
