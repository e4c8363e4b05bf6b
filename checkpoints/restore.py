"""Loading the parameters of a checkpoint onto the devices that the caller wants."""

import dataclasses
from typing import Any

import jax

from jaxlm.checkpoints.arrays import Progress, restore_tree
from jaxlm.checkpoints.layout import PARAMS, leaf_name
from jaxlm.checkpoints.manifest import Checkpoint, verify_checkpoint
from jaxlm.errors import CheckpointError, JaxlmError
from jaxlm.params import Params, abstract_params


def restore_params(
    checkpoint: Checkpoint,
    *,
    dtype: str | None = None,
    shardings: Any = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> Params:
    """The parameters, in the tree that the config declares.

    dtype: None keeps the stored one; "float32", "bfloat16" or "float16" converts. shardings: None for the default
    device, one `jax.sharding.Sharding` for all leaves, or a tree of them, on any devices. verify hashes every file
    first; chunk checksums are checked either way. Peak memory is the result plus at most one stacked leaf.
    """
    if verify:
        verify_checkpoint(checkpoint.path, progress)
    config = checkpoint.config if dtype is None else dataclasses.replace(checkpoint.config, dtype=dtype)
    target = with_shardings(abstract_params(config), shardings)
    return restore_tree(checkpoint.path / PARAMS, target, cast=dtype is not None, progress=progress)


def with_shardings(target: Any, shardings: Any) -> Any:
    """A tree of `ShapeDtypeStruct`s with shardings added. Raises CheckpointError for one that does not fit its leaf."""
    if shardings is None:
        return target
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _, one=shardings: one, target)
    try:
        return jax.tree_util.tree_map_with_path(_with_sharding, target, shardings)
    except JaxlmError:
        raise
    except ValueError as error:
        raise CheckpointError("shardings: are not a tree with one sharding for each array") from error


def _with_sharding(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    try:
        sharding.shard_shape(leaf.shape)
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{leaf_name(path)}: shape {list(leaf.shape)} does not fit {sharding}") from error
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
