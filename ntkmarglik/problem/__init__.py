"""What is learned from: data sets, networks, augmentations."""
