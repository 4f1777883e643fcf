"""How a network uses its weights: recorded while it runs, planned once, verified on two data
points.
"""
