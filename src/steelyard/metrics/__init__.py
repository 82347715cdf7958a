"""Derive everything that follows from a record: metrics, checks, status, comparisons, verification.

Nothing here measures or writes. `run/assemble.py` calls it when a record is made, `steelyard
verify` calls it again, and `report` and `cli` compare records with it. Formulas are versioned
(`Record.formulas`): a published formula never changes.
"""
