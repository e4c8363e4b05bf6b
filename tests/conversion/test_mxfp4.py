"""MXFP4 experts: every bit pattern is the number that the format says, and the model is that of the plain weights."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from family_cases import cases, reference
from foreign import save_folder

from jaxlm.conversion import load_source
from jaxlm.conversion.export import export_hf
from jaxlm.conversion.mxfp4 import unpack
from jaxlm.errors import CheckpointError, ConfigError


def value(bits: int) -> float:
    """Sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def widened(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E,R,G,16] and [E,R,G] -> [E,R,32*G], one byte at a time."""
    out = np.zeros((*scales.shape, 32))
    for index in np.ndindex(blocks.shape):
        byte, factor = int(blocks[index]), 2.0 ** (int(scales[index[:-1]]) - 127)
        out[(*index[:-1], 2 * index[-1])] = value(byte & 15) * factor
        out[(*index[:-1], 2 * index[-1] + 1)] = value(byte >> 4) * factor
    return out.reshape(*scales.shape[:2], -1).astype(np.float32)


def test_every_byte_and_scale() -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16).repeat(3, axis=0)
    scales = np.array([1, 127, 252], np.uint8)[:, None].repeat(16, axis=1)
    got = unpack(blocks, scales)
    np.testing.assert_array_equal(got, widened(blocks[None], scales[None])[0])
    np.testing.assert_array_equal(got.astype(ml_dtypes.bfloat16).astype(np.float32), got)


def folders(path: Path, inner: int = 32) -> tuple[Path, Path, dict[str, Any]]:
    """The same model with packed and with plain experts, their matrices inputs first."""
    case = cases("gpt_oss")[0]
    config, shapes, _ = reference("gpt_oss", case)
    config = config | {"hidden_size": 64, "intermediate_size": inner}
    sizes = {48: 64, 80: 2 * inner, 40: inner}
    shapes = {n: tuple(sizes.get(s, s) if "experts" in n or s == 48 else s for s in v) for n, v in shapes.items()}
    plain = {n: a.astype(ml_dtypes.bfloat16) for n, a in case.tensors(shapes).items()}
    packed, rng = dict(plain), np.random.default_rng(0)
    for name in [n for n in shapes if n.endswith("_proj") and "experts" in n]:
        experts, inputs, outputs = shapes[name]
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(121, 125, (experts, outputs, inputs // 32), dtype=np.uint8)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.ascontiguousarray(np.swapaxes(widened(blocks, scales), 1, 2).astype(ml_dtypes.bfloat16))
    quantized = config | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    return save(path / "packed", quantized, packed), save(path / "plain", config, plain), quantized


def save(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    return save_folder(path, config, tensors, "bfloat16")


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_same_model_as_the_plain_weights(tmp_path: Path, dtype: str | None) -> None:
    packed, plain, _ = folders(tmp_path)
    ours, theirs = (load_source(path, dtype) for path in (packed, plain))
    assert ours.config == theirs.config
    assert ours.config.dtype == (dtype or "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_an_export_holds_plain_weights_and_says_so(tmp_path: Path) -> None:
    packed, plain, _ = folders(tmp_path)
    loaded = load_source(packed)
    export_hf(loaded.config, loaded.params, loaded.source.original, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again = load_source(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, again.params, load_source(plain).params)


def test_another_method_and_odd_rows_are_refused(tmp_path: Path) -> None:
    packed, _, config = folders(tmp_path / "a")
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="fp8"):
        load_source(packed)
    packed, _, config = folders(tmp_path / "b")
    (packed / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(CheckpointError):
        load_source(packed)
