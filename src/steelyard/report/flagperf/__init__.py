"""Markdown pages in the form of FlagPerf's published result pages (`report --layout flagperf`)."""

from steelyard.report.flagperf.page import LAYOUTS, CasePage, build_flagperf_pages

__all__ = ["LAYOUTS", "CasePage", "build_flagperf_pages"]
