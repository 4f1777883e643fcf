"""How a network uses its weights: recorded, planned once, verified on two data points."""
