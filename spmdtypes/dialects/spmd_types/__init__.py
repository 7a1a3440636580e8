"""Programs annotated for the package spmd_types: what they say, and whether it is so."""

from spmdtypes.dialects.spmd_types.claims import Claim, Claims, judged, watching
from spmdtypes.dialects.spmd_types.meaning import Annotation, Axes, read

__all__ = ["Annotation", "Axes", "Claim", "Claims", "judged", "read", "watching"]
