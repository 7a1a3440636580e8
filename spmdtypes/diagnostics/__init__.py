"""Findings and how they are shown. Torch-free."""
