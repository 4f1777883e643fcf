"""The neural tangent kernel: its Gram matrices, how rows are kept, many values of the prior."""
