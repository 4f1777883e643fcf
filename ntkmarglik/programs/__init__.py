"""The programs: each with its settings, its checks and its main function."""
