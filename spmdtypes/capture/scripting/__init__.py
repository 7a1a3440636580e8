"""What a training script does besides computing, answered so that a check can go on."""

from spmdtypes.capture.scripting.context import Logged
from spmdtypes.capture.scripting.session import Surroundings, scripting

__all__ = ["Logged", "Surroundings", "scripting"]
