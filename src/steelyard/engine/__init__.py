"""The contract of an engine: what it is given, what it yields, and the rows that say what each
engine can do.
"""
