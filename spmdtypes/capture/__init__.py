"""Capture: an eager program, recorded op by op below autograd, as a pure `spmdtypes.graph.Graph`."""
