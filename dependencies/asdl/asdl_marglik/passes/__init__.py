"""Two passes over the data: small statistics, then exact gradients of anything made of them."""
