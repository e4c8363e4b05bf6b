"""From and to other people's files: Hugging Face folders and GGUF, one small declarative module per model family.

What belongs here: readers and writers of foreign formats, the translation of their configs and tensor names, export and
verification. What does not: anything that runs on the device (jaxlm/) and jaxlm's own files (checkpoints/).
"""

from jaxlm.conversion.load import Loaded, config_for, layer_tensors, load_params, load_source
from jaxlm.conversion.quantised import load_quantised
from jaxlm.conversion.source import Source, open_source

__all__ = [
    "Loaded",
    "Source",
    "config_for",
    "layer_tensors",
    "load_params",
    "load_quantised",
    "load_source",
    "open_source",
]
