"""The experiment library on top of `laplace_marglik`: data, models, training and reports."""
