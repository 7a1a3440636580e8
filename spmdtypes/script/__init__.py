"""Whole training scripts: run as every rank and as the mesh of ones, compared at the end of a step."""
