"""Two passes over the data: small statistics first, exact gradients of anything made of them
second.
"""
