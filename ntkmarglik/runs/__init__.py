"""Run folders: metrics, checkpoints, summaries, tables, loggers."""
