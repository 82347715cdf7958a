"""Markdown pages in the form of FlagPerf's published result pages (`report --layout flagperf`)."""

from steelyard.report.flagperf.page import LAYOUTS, CasePage, pages

__all__ = ["LAYOUTS", "CasePage", "pages"]
