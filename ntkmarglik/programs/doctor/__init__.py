"""What is installed here, and whether it works; see `ntk-marglik doctor`."""
