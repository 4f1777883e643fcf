"""`report.html` of a run folder: one file that opens anywhere, without a network."""

from ntkmarglik.runs.page.page import FILE, Page, rendered, save

__all__ = ["FILE", "Page", "rendered", "save"]
