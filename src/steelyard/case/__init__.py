"""Cases and requests: the question of a benchmark, its precision and tune, and one run as it was
requested.

First room of a run's flow: cli -> case -> plan -> run. Nothing here starts a process; only case
files are read.
"""
