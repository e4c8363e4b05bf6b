"""Tiny checkpoints as others publish them, written by the tests: Hugging Face folders and GGUF files."""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int, norm: float = 1.0) -> dict[str, np.ndarray]:
    """float32 weights from seed, name and shape alone: norms around `norm`, biases around 0, matrices by 1/sqrt(in)."""
    return {name: random_weight(name, tuple(shape), seed, norm) for name, shape in shapes.items()}


def random_weight(name: str, shape: tuple[int, ...], seed: int, norm: float) -> np.ndarray:
    values = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if re.search(r"(norm[^.]*|\bln\w*)\.weight$", name):
        values = norm + 0.2 * values
    elif name.endswith("scalar"):
        values = 1 + 0.2 * values
    elif len(shape) < 2:
        values = 0.5 * values
    elif "embed" not in name and not name.endswith(("wte.weight", "wpe.weight")):
        values = values * shape[-1] ** -0.5
    return values.astype(np.float32)


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """A file written by the format's rules alone."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    blobs, end = [], 0
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        kind = NAMES.get(array.dtype.name) or {"int32": "I32", "uint8": "U8"}[array.dtype.name]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    write_safetensors(path, json.dumps(header).encode(), b"".join(blobs))


def write_safetensors(path: Path, header: bytes, data: bytes) -> None:
    """A file with this header, whatever it says."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def save_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], dtype: str = "float32", shards: int = 1
) -> Path:
    """A Hugging Face folder, its weights in `dtype`, in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    cast = {name: a.astype(kind) if a.dtype.kind == "f" else a for name, a in tensors.items()}
    if shards == 1:
        save_safetensors(folder / "model.safetensors", cast, {"format": "pt"})
        return folder
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: cast[name] for name in list(cast)[number::shards]}
        save_safetensors(folder / file, part, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def save_gguf(
    path: Path,
    arch: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, str] | None = None,
    alignment: int = 32,
) -> Path:
    """A GGUF file written by the gguf package.

    metadata goes without the architecture's prefix. kinds: tensor -> block type, where it is not stored as it is.
    """
    writer = gguf.GGUFWriter(path, arch)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        full = key if key.startswith(("general.", "tokenizer.", "split.")) else f"{arch}.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(full, value)
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, NAMES[array.dtype.name])]
        data = array if array.dtype == np.float16 else gguf.quants.quantize(array.astype(np.float32), kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_config(**changes: Any) -> dict[str, Any]:
    """A small config.json whose shapes tell heads, groups and widths apart; a change to None removes the field."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


def llama_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors of a Llama checkpoint, written out by hand."""
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, width)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        linear = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": s for n, s in linear.items()}
        if config.get("attention_bias"):
            shapes |= {f"{at}.self_attn.{n}_proj.bias": s[:1] for n, s in linear.items()}
        mlp = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        shapes |= {f"{at}.mlp.{n}_proj.weight": s for n, s in mlp.items()}
        if config.get("mlp_bias"):
            shapes |= {f"{at}.mlp.{n}_proj.bias": s[:1] for n, s in mlp.items()}
        shapes |= {f"{at}.{n}.weight": (width,) for n in ("input_layernorm", "post_attention_layernorm")}
    return shapes


def llama_folder(folder: Path, dtype: str = "float32", shards: int = 1, **changes: Any) -> Path:
    """A random Llama checkpoint."""
    config = llama_config(**changes)
    return save_folder(folder, config, random_weights(llama_shapes(config), 0), dtype, shards)
