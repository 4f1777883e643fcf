"""The same passes shared by several processes."""
