"""The experiment library: data, models, augmentation, training and reports on top of
`laplace_marglik`.
"""
