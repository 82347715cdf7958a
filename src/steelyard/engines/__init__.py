"""One folder an engine. Nothing here is imported before a worker loads the engine that its row
names.
"""
