"""Denotations, layouts, derived rules. No torch, no mypy; sympy only in `tools/derive_laws.py`."""
