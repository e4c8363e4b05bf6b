"""jaxlm's own files: Orbax arrays with the config, tokenizer and a manifest of hashes beside them; the known models.

What belongs here: saving and restoring onto target shardings, integrity checks. What does not: foreign formats
(conversion/) and anything that runs on the device (jaxlm/).

A checkpoint is a folder:

    jaxlm.json           manifest: format version, every array's shape and dtype, size and SHA-256 of every file
    model_config.json    the ModelConfig
    source_config.json   the published config that it was converted from, if any, kept for export
    tokenizer.json ...   tokenizer, chat template and generation defaults as they came
    params/              an Orbax checkpoint, one Zarr array per parameter, one file per layer (or part of one)

Orbax and TensorStore are imported by the functions that read or write arrays, not by this package.
"""

from jaxlm.checkpoints.arrays import restore_tree, save_tree
from jaxlm.checkpoints.known import DEFAULT, KNOWN, resolve
from jaxlm.checkpoints.manifest import Checkpoint, is_checkpoint, read_checkpoint, verify_checkpoint
from jaxlm.checkpoints.restore import restore_params
from jaxlm.checkpoints.write import WritePlan, plan_write, save_params, write_checkpoint

__all__ = [
    "DEFAULT",
    "KNOWN",
    "Checkpoint",
    "WritePlan",
    "is_checkpoint",
    "plan_write",
    "read_checkpoint",
    "resolve",
    "restore_params",
    "restore_tree",
    "save_params",
    "save_tree",
    "verify_checkpoint",
    "write_checkpoint",
]
