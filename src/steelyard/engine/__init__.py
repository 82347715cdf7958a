"""The contract between the package and an engine: the job an engine gets, what it yields, the
framework under it, and the rows that say what each engine can do.
"""
