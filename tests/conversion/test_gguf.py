"""GGUF files: the same model as the Hugging Face folder they were made from, whatever the layout; damage is refused."""

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from foreign import llama_config, llama_folder, llama_shapes, random_weights, save_gguf
from foreign_gguf import common_metadata
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.config import FactorScaling, Llama3Scaling, RopeSpec
from jaxlm.conversion import load_source, open_source
from jaxlm.conversion.export import export_hf
from jaxlm.conversion.standard import attention_of
from jaxlm.errors import CheckpointError, ConfigError, JaxlmError
from jaxlm.rope import inverse_frequencies

PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return top.get(name, "output.weight")
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{PARTS['.'.join(middle)]}.{kind}"


def pair_up(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row j of a head's first half to place 2j, row j of its second half to 2j + 1."""
    head_dim = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for j in range(head_dim // 2):
            out[head * head_dim + 2 * j] = rows[head * head_dim + j]
            out[head * head_dim + 2 * j + 1] = rows[head * head_dim + j + head_dim // 2]
    return out


def llama_gguf(path: Path, dtype: str = "float32", extra: dict[str, Any] | None = None, **options: Any) -> Path:
    """The model of `llama_folder(**changes)` as its converter would write it; extra: metadata and tensors by name."""
    changes = options.pop("changes", {})
    config = llama_config(**changes)
    tensors = {}
    for name, array in random_weights(llama_shapes(config), 0).items():
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}
        paired = next((config[key] for part, key in heads.items() if f".{part}_proj." in name), 0)
        array = pair_up(array, paired) if paired else array
        tensors[gguf_name(name)] = array.astype(dtype) if array.ndim > 1 else array
    metadata: dict[str, Any] = common_metadata(config) | {
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
        "attention.layer_norm_rms_epsilon": float(np.float32(config["rms_norm_eps"])),
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config["vocab_size"])],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
    }
    for name, value in (extra or {}).items():
        (tensors if isinstance(value, np.ndarray) else metadata)[name] = value
    return save_gguf(path, options.pop("arch", "llama"), metadata, tensors, **options)


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


@pytest.mark.parametrize("alignment", [16, 32, 64])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=["plain", "tied", "biases"],
)
def test_same_model_as_the_folder(tmp_path: Path, alignment: int, changes: dict[str, Any]) -> None:
    ours = load_source(llama_gguf(tmp_path / "m.gguf", changes=changes, alignment=alignment))
    theirs = load_source(llama_folder(tmp_path / "hf", **changes, rms_norm_eps=float(np.float32(1e-5))))
    assert ours.config == theirs.config
    assert ours.source.eos_ids == (2, 5)
    assert_equal(ours.params, theirs.params)


@pytest.mark.parametrize(("stored", "name"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_narrow_floats_keep_their_bits(tmp_path: Path, stored: str, name: str) -> None:
    """Norms, which GGUF keeps in float32, follow the matrices."""
    config = llama_config()
    kinds = {gguf_name(n): stored for n, shape in llama_shapes(config).items() if len(shape) > 1}
    dtype = "float16" if stored == "F16" else "float32"
    ours = load_source(llama_gguf(tmp_path / "m.gguf", dtype, kinds=kinds))
    theirs = load_source(llama_folder(tmp_path / "hf", name))
    assert ours.config.dtype == name
    assert_equal(ours.params["segments"], theirs.params["segments"])


BLOCKS = [k for k in gguf.GGMLQuantizationType if k in gguf.quants._type_traits and k.name != "BF16"]


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda k: k.name)
def test_every_block_type_is_read_as_the_package_reads_it(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Random bytes for the blocks, so that types which the package cannot write are there too."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (61, 256 // weights * size), dtype=np.uint8)
    path = tmp_path / "m.gguf"
    changes = {"hidden_size": 256, "tie_word_embeddings": True}
    llama_gguf(path, changes=changes)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    reader = gguf.GGUFReader(path)
    for key, value in reader.fields.items():
        if key.startswith("llama."):
            (writer.add_float32 if "eps" in key or "base" in key else writer.add_uint32)(key, value.contents())
    for tensor in reader.tensors:
        block = tensor.name == "token_embd.weight"
        writer.add_tensor(tensor.name, raw if block else np.array(tensor.data), raw_dtype=kind if block else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load_source(tmp_path / "q.gguf")
    assert loaded.config.dtype == "float32"
    expected = gguf.quants.dequantize(raw, kind)
    np.testing.assert_array_equal(np.asarray(loaded.params["embed"]["table"]), expected)


def test_divisors_of_frequencies(tmp_path: Path) -> None:
    """What a converter makes of llama3 scaling turns as fast as llama3 scaling, and survives an export."""
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 32)
    plain, scaled = (inverse_frequencies(RopeSpec(10000.0, s), 10).astype(float) for s in (None, scaling))
    divisors = (plain / scaled).astype(np.float32)
    assert divisors.max() == 8.0
    loaded = load_source(llama_gguf(tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors}))
    rope = attention_of(loaded.config.layers[0]).rope
    assert rope == RopeSpec(10000.0, FactorScaling(tuple(divisors.tolist())))
    np.testing.assert_allclose(inverse_frequencies(rope, 10), scaled, rtol=1e-6)
    export_hf(loaded.config, loaded.params, loaded.source.original, tmp_path / "hf")
    again = load_source(tmp_path / "hf")
    assert again.config == loaded.config
    assert_equal(again.params, loaded.params)


def test_linear_scaling(tmp_path: Path) -> None:
    for i, extra in enumerate(
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0})
    ):
        config = open_source(llama_gguf(tmp_path / f"{i}.gguf", extra=extra)).config
        assert attention_of(config.layers[0]).rope.scaling.factor == 4.0  # type: ignore[union-attr]


CONFIGS = {
    "another architecture": ({"arch": "mamba"}, "general.architecture is 'mamba', a known model that is not built"),
    "experts": ({"extra": {"expert_count": 8}}, "tensor 'blk.0.ffn_\\w+.weight' is missing"),
    "unknown setting": ({"extra": {"attention.clamp_kqv": 8.0}}, "'attention.clamp_kqv' is 8.0"),
    "other value width": ({"extra": {"attention.value_length": 12}}, "'attention.value_length' is 12"),
    "partial rotation": ({"extra": {"rope.dimension_count": 6}}, "'partial_rotary_factor' is 0.6"),
    "too wide a rotation": ({"extra": {"rope.dimension_count": 12}}, "dimension_count is 12; allowed: 1 to"),
    "unknown scaling": ({"extra": {"rope.scaling.type": "spiral"}}, "'rope_scaling.type' is spiral"),
    "scaling without a type": ({"extra": {"rope.scaling.attn_factor": 1.5}}, "'rope.scaling.attn_factor' is 1.5"),
    "heads per layer": ({"extra": {"attention.head_count": [8, 4]}}, "'num_attention_heads' is"),
    "other frequencies": ({"extra": {"rope_factors_long.weight": np.ones(5, np.float32)}}, "'rope_factors_long' is"),
    "divisors of another length": (
        {"extra": {"rope_freqs.weight": np.ones(4, np.float32)}},
        "has length is 4; allowed: 5",
    ),
    "extra tensor": (
        {"extra": {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}},
        "attn_q_norm.weight' is in the file",
    ),
    "a part of several": ({"extra": {"split.count": 2}}, "is one of 2 parts"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_not_understood(name: str, tmp_path: Path) -> None:
    options, message = CONFIGS[name]
    with pytest.raises((ConfigError, CheckpointError), match=message):
        open_source(llama_gguf(tmp_path / "m.gguf", **options))


def head(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def table(kind: int = 0, dims: tuple[int, ...] = (4,), offset: int = 0, name: str = "a") -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = (1 << 64) - 1
BYTES = {
    "another format": (b"GGML" + bytes(60), "starts with b'GGML'"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(60), "allowed: GGUF, little-endian"),
    "first version": (head(version=1) + bytes(60), "version 1"),
    "nothing": (b"", "the magic number needs 4 bytes, 0 are left"),
    "too many tensors": (head(HUGE), "the number of tensors is 18446744073709551615"),
    "too many entries": (head(0, HUGE), "the number of metadata entries is"),
    "a long name": (
        head(0, 1) + struct.pack("<Q", HUGE) + bytes(60),
        "a metadata key needs 18446744073709551615 bytes",
    ),
    "a long array": (head(0, 1) + text("k") + struct.pack("<IIQ", 9, 6, 1 << 62) + bytes(60), "the length of 'k' is"),
    "arrays in arrays": (
        head(0, 1) + text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9 + bytes(60),
        "'k' has",
    ),
    "unknown value type": (head(0, 1) + text("k") + struct.pack("<I", 13) + bytes(60), "'k' has value type 13"),
    "no UTF-8": (head(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(60), "a metadata key is not valid UTF-8"),
    "an entry twice": (head(0, 2) + 2 * (text("k") + struct.pack("<II", 4, 1)) + bytes(60), "'k' is there twice"),
    "strange alignment": (
        head(0, 1) + text("general.alignment") + struct.pack("<II", 4, 3) + bytes(60),
        "alignment is 3",
    ),
    "unknown tensor type": (head(1) + table(99) + bytes(90), "tensor 'a' has type 99"),
    "five dimensions": (head(1) + table(0, (1,) * 5) + bytes(90), "tensor 'a' has 5 dimensions"),
    "an empty dimension": (head(1) + table(0, (4, 0)) + bytes(90), "tensor 'a' has shape"),
    "broken blocks": (head(1) + table(2, (33,)) + bytes(90), "rows of a multiple of 32 weights"),
    "a tensor beyond the end": (head(1) + table(0, (1 << 40, 1 << 20)) + bytes(90), "is cut off: tensor 'a'"),
    "an unaligned tensor": (
        head(1) + table(offset=5) + bytes(90),
        "is at byte 5 of the data; allowed: a multiple of 32",
    ),
    "overlapping tensors": (head(2) + table() + table(name="b") + bytes(90), "overlaps"),
    "a tensor twice": (head(2) + table() + table(offset=32) + bytes(90), "tensor 'a' is there twice"),
}


@pytest.mark.parametrize("name", BYTES)
def test_damaged_head(name: str, tmp_path: Path) -> None:
    contents, message = BYTES[name]
    (tmp_path / "m.gguf").write_bytes(contents)
    with pytest.raises(CheckpointError, match=message):
        open_source(tmp_path / "m.gguf")


@given(st.data())
def test_any_cut_and_any_changed_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = llama_gguf(tmp_path_factory.mktemp("fuzz") / "m.gguf", changes={"num_hidden_layers": 1})
    contents = bytearray(path.read_bytes())
    path.write_bytes(contents[: data.draw(st.integers(0, len(contents) - 1))])
    with pytest.raises(CheckpointError):
        open_source(path)
    for _ in range(data.draw(st.integers(1, 4))):
        contents[data.draw(st.integers(0, 3000))] = data.draw(st.integers(0, 255))
    path.write_bytes(contents)
    with contextlib.suppress(JaxlmError):
        open_source(path)
