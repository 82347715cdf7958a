"""The engines, one folder each. A worker imports only the one that its row names
(engine/engine_rows.py).
"""
