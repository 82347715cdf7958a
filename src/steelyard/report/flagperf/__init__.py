"""Pages in the form of FlagPerf's published result pages."""

from steelyard.report.flagperf.page import LAYOUTS, CasePage, pages

__all__ = ["LAYOUTS", "CasePage", "pages"]
