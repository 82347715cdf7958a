"""One run of a case: the parent, node agents and workers, the measured loop, and the record that is
assembled from them.
"""
