"""Files that are kept of a run: records and spec records, their signatures, and an index of
records.
"""
