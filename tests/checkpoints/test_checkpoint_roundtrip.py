"""What is written comes back with the same bits: through this package, through plain Orbax, on other devices."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxlm import checkpoints
from jaxlm.checkpoints import layout
from jaxlm.config import ModelConfig
from jaxlm.errors import CheckpointError, ConfigError
from jaxlm.params import abstract_params

DTYPES = ["float32", "bfloat16", "float16"]


def bits(tree) -> list[tuple]:
    """Structure-free view of a tree: name, dtype, shape and bytes of each leaf."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return [(layout.leaf_name(p), str(a.dtype), a.shape, np.asarray(a).tobytes()) for p, a in found]


def random_bits(config: ModelConfig, seed: int = 0):
    """Parameters with any bits at all: NaNs with payloads, infinities, negative zeros, whole layers of zeros."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        raw = rng.integers(0, 256, (int(np.prod(leaf.shape)) * leaf.dtype.itemsize,), dtype=np.uint8)
        array = raw.view(leaf.dtype).reshape(leaf.shape).copy()
        array[0] = 0
        return array

    return jax.tree.map(draw, abstract_params(config))


@settings(max_examples=6)
@given(st.data(), st.sampled_from(DTYPES))
def test_round_trip_keeps_every_bit(data, dtype):
    config = data.draw(tiny.configs(dtype=dtype))
    params = random_bits(config)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints.save_params(Path(folder) / "c", config, params)
        opened = checkpoints.read_checkpoint(Path(folder) / "c")
        assert opened.config == config
        assert opened.nbytes == sum(a.nbytes for a in jax.tree.leaves(params))
        restored = checkpoints.restore_params(opened, verify=True)
        assert jax.tree.structure(restored) == jax.tree.structure(params)
        assert bits(restored) == bits(params)
        with ocp.PyTreeCheckpointer() as plain:
            assert sorted(bits(plain.restore(Path(folder) / "c" / layout.PARAMS))) == sorted(bits(params))


def test_plain_orbax_restores_onto_shardings(tmp_path):
    params = random_bits(tiny.MIXED)
    checkpoints.save_params(tmp_path / "c", tiny.MIXED, params)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "x")
    target = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=split(mesh, a.shape)), params)
    with ocp.StandardCheckpointer() as plain:
        restored = plain.restore(tmp_path / "c" / layout.PARAMS, target)
    assert all(len(a.sharding.device_set) == 2 for a in jax.tree.leaves(restored))
    assert bits(restored) == bits(params)


def split(mesh, shape) -> jax.sharding.NamedSharding:
    """The last axis that the mesh divides is cut, everything else is replicated."""
    cut = [None] * len(shape)
    for axis in reversed(range(len(shape))):
        if shape[axis] % mesh.size == 0:
            cut[axis] = "x"
            break
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*cut))


def shardings(config, mesh):
    return jax.tree.map(lambda a: split(mesh, a.shape), abstract_params(config))


WIDE = tiny.config(*[tiny.layer(heads=8, kv_heads=8, head_dim=2, inner=16)] * 2, hidden_size=8, vocab_size=16)
LOAD = """
import sys, hashlib, jax, numpy as np
sys.path[:0] = sys.argv[3:]
import test_checkpoint_roundtrip as t
from jaxlm import checkpoints
assert jax.device_count() == int(sys.argv[2])
mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
restored = checkpoints.restore_params(checkpoints.read_checkpoint(sys.argv[1]), shardings=t.shardings(t.WIDE, mesh))
assert all(len(a.sharding.device_set) == jax.device_count() for a in jax.tree.leaves(restored))
assert t.bits(restored) == t.bits(t.random_bits(t.WIDE))
print("equal")
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_saved_on_eight_devices_restored_on_fewer(tmp_path, devices):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    assert mesh.size == 8
    params = jax.tree.map(jax.device_put, random_bits(WIDE), shardings(WIDE, mesh))
    assert any(not a.is_fully_replicated for a in jax.tree.leaves(params))
    checkpoints.save_params(tmp_path / "c", WIDE, params)
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    paths = [str(Path(__file__).parent), str(Path(tiny.__file__).parent)]
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", LOAD, str(tmp_path / "c"), str(devices), *paths]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.stderr, result.returncode) == ("equal\n", "", 0)


def test_shards_read_alone_equal_the_whole(tmp_path, monkeypatch):
    """Arrays that span hosts are read shard by shard; here every sharding pretends to."""
    params = random_bits(WIDE)
    opened = checkpoints.save_params(tmp_path / "c", WIDE, params)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    tree = shardings(WIDE, mesh)
    monkeypatch.setattr(jax.sharding.NamedSharding, "is_fully_addressable", property(lambda _: False))
    restored = checkpoints.restore_params(opened, shardings=tree)
    monkeypatch.undo()
    assert bits(restored) == bits(params)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([2, 4]), st.data())
def test_chunks_tile_the_array(shape, itemsize, data):
    names = ["embed", "mlp", "heads", "head_dim"]
    axes = tuple(data.draw(st.sampled_from(names)) for _ in shape)
    if data.draw(st.booleans()):
        axes = ("layers", *axes[1:])
    limit = layout.CHUNK_BYTES
    try:
        layout.CHUNK_BYTES = 256
        chunk = layout.chunk_shape(tuple(shape), itemsize, axes)
    finally:
        layout.CHUNK_BYTES = limit
    assert np.prod(chunk) * itemsize <= 256
    assert axes[0] != "layers" or chunk[0] == 1
    leaf = layout.Leaf("a", tuple(shape), "float32", chunk, axes[0] == "layers")
    count = np.zeros(shape, int)
    for index in leaf.chunks():
        count[leaf.window(index)] += 1
    assert (count == 1).all()
    assert sorted(i for r in range(shape[0]) for i in leaf.chunks(r)) == leaf.chunks() or not leaf.stacked


def test_large_layers_are_cut_along_the_axis_that_devices_share(tmp_path, monkeypatch):
    """Along ffn width and heads, though the model's width is larger; then along what is left."""
    monkeypatch.setattr(layout, "CHUNK_BYTES", 128)
    config = tiny.config(*[tiny.layer(heads=4, kv_heads=4, head_dim=2, inner=8)] * 2, hidden_size=16)
    params = random_bits(config)
    opened = checkpoints.save_params(tmp_path / "c", config, params)
    assert opened.leaves["segments.0.0.ffn.down"].chunk == (1, 16, 2)
    assert opened.leaves["segments.0.0.attn.q"].chunk == (1, 1, 2, 16)
    monkeypatch.undo()  # A reader follows the file, not its own idea of chunks.
    assert bits(checkpoints.restore_params(checkpoints.read_checkpoint(tmp_path / "c"))) == bits(params)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("asked", DTYPES)
def test_dtype_changes_only_when_asked(tmp_path, stored, asked):
    config = tiny.config(dtype=stored)
    params = tiny.random_params(config)
    opened = checkpoints.save_params(tmp_path / "c", config, params)
    restored = checkpoints.restore_params(opened, dtype=asked)
    expected = jax.tree.map(lambda a: np.asarray(a).astype(np.float32).astype(asked), params)
    assert bits(restored) == bits(expected)
    assert {a.dtype.name for a in jax.tree.leaves(checkpoints.restore_params(opened))} == {stored}


def test_a_value_that_float16_cannot_hold(tmp_path):
    params = jax.tree.map(lambda a: np.full(a.shape, 1e5, np.float32), abstract_params(tiny.FULL))
    opened = checkpoints.save_params(tmp_path / "c", tiny.FULL, params)
    with pytest.raises(CheckpointError, match="float16"):
        checkpoints.restore_params(opened, dtype="float16")
    with pytest.raises(ConfigError, match="int8"):
        checkpoints.restore_params(opened, dtype="int8")


def test_shardings_that_do_not_fit_are_named(tmp_path):
    opened = checkpoints.save_params(tmp_path / "c", tiny.FULL, random_bits(tiny.FULL))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with pytest.raises(CheckpointError, match=r"embed.table: shape \[13, 8\] does not fit"):
        checkpoints.restore_params(opened, shardings=cut)
    with pytest.raises(CheckpointError, match="one sharding for each"):
        checkpoints.restore_params(opened, shardings={"embed": cut})


def test_default_device_arrays_are_not_pinned_to_it(tmp_path):
    """Restored without shardings, parameters may be used together with arrays of any device."""
    opened = checkpoints.save_params(tmp_path / "c", tiny.FULL, random_bits(tiny.FULL))
    table = checkpoints.restore_params(opened)["embed"]["table"]
    other = jax.device_put(np.zeros((1, 1), np.float32), jax.devices()[3])
    assert (table + other).devices() == {jax.devices()[3]}


def test_any_tree_restores_onto_its_abstract_self(tmp_path):
    import optax

    params = tiny.random_params(tiny.FULL)
    state = optax.adamw(1e-3).init(params)
    checkpoints.save_tree(tmp_path / "state", state)
    restored = checkpoints.restore_tree(tmp_path / "state", jax.eval_shape(lambda: state))
    assert tiny.equal_trees(restored, state)
    other = jax.eval_shape(lambda: optax.sgd(1e-3, momentum=0.9).init(params))
    with pytest.raises(CheckpointError, match="cannot be opened"):
        checkpoints.restore_tree(tmp_path / "state", other)
    wide = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, "float32"), state)
    with pytest.raises(CheckpointError, match="count: has dtype int32; expected float32"):
        checkpoints.restore_tree(tmp_path / "state", wide)
