"""Random models of known shapes, so that speed can be measured where no checkpoint is at hand: `random:NAME`."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import jaxlm
from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig, MoESpec, NormSpec, RopeSpec
from jaxlm.errors import RequestError
from jaxlm.params import CONSTANTS, Param, declare
from jaxlm.quant import FP8, GROUP, KINDS, Q4, Q8

PREFIX = "random:"
MATRICES = ("q", "k", "v", "o", "gate", "up", "down", "table")  # What loading would quantise.
ALIASES = {"8b": "llama-8b", "1b": "llama-1b", "135m": "llama-135m", "270m": "gemma-270m"}


@dataclass(frozen=True)
class Shape:
    """A config, and the family whose published code can be given the same shape ("" for none)."""

    config: ModelConfig
    family: str = ""


def llama(
    vocab: int, width: int, layers: int, heads: int, kv_heads: int, inner: int, *, tied: bool, context: int = 65536
) -> Shape:
    """Pre-norm, gated, grouped queries."""
    attention = AttentionSpec(heads, kv_heads, width // heads, RopeSpec(500000.0))
    stack = (LayerSpec(attention, FFNSpec(inner)),) * layers
    return Shape(ModelConfig(vocab, width, stack, tie_embeddings=tied, max_positions=context), "llama")


def gemma() -> Shape:
    """As Gemma 3 270M: five layers with a window of 512 for each that sees all."""
    norm = NormSpec(eps=1e-6, unit_offset=True)
    local = AttentionSpec(4, 1, 256, RopeSpec(10000.0), window=512, scale=256**-0.5, qk_norm=norm)
    full = replace(local, rope=RopeSpec(1000000.0), window=0)
    ffn = FFNSpec(2048, "gelu_tanh")
    layers = tuple(LayerSpec(full if i % 6 == 5 else local, ffn, norm, post_norm=True) for i in range(18))
    return Shape(ModelConfig(
        262144, 640, layers, norm, tie_embeddings=True, max_positions=65536, embed_scale=math.sqrt(640)
    ), "gemma3_text")  # fmt: skip


def windowed(vocab: int, width: int, layers: int, heads: int, inner: int, window: int) -> Shape:
    """Every layer with a window: memory must not grow with the context."""
    attention = AttentionSpec(heads, heads // 2, width // heads, RopeSpec(), window=window)
    return Shape(ModelConfig(vocab, width, (LayerSpec(attention, FFNSpec(inner)),) * layers, max_positions=65536))


def mixture(vocab: int, width: int, layers: int, heads: int, experts: int, top_k: int, inner: int) -> Shape:
    """As Mixtral."""
    attention = AttentionSpec(heads, heads // 2, width // heads, RopeSpec(1000000.0))
    stack = (LayerSpec(attention, MoESpec(experts, top_k, FFNSpec(inner))),) * layers
    return Shape(ModelConfig(vocab, width, stack, max_positions=65536), "mixtral")


SHAPES = {
    "llama-8b": llama(128256, 4096, 32, 32, 8, 14336, tied=False),
    "llama-1b": llama(128256, 2048, 16, 32, 8, 8192, tied=True),
    "llama-135m": llama(49152, 576, 30, 9, 3, 1536, tied=True),
    "gemma-270m": gemma(),
    "moe-1b": mixture(32000, 1024, 12, 16, 8, 2, 3584),
    "tiny": llama(1024, 64, 2, 4, 2, 128, tied=True),
    "tiny-windowed": windowed(1024, 64, 2, 4, 128, 32),
    "tiny-moe": mixture(1024, 64, 2, 4, 8, 2, 96),
}


def named(model: str, dtype: str) -> Shape | None:
    """The shape that `random:NAME` means, in dtype; None for any other model. Raises RequestError for another NAME."""
    if not model.startswith(PREFIX):
        return None
    name = model.removeprefix(PREFIX)
    name = ALIASES.get(name, name)
    if name not in SHAPES:
        allowed = ", ".join(PREFIX + known for known in SHAPES)
        raise RequestError(f"model {model!r} is not known; allowed: {allowed}, or anything that jaxlm.load takes")
    return replace(SHAPES[name], config=replace(SHAPES[name].config, dtype=dtype))


def random_model(shape: Shape, quantize: str | None, name: str) -> jaxlm.Model:
    """A model without a tokenizer, its weights drawn in their own dtype."""
    if quantize not in (None, *KINDS):
        raise RequestError(f"quantize is {quantize!r}, but a random model has no file; allowed: {', '.join(KINDS)}")
    return jaxlm.Model(shape.config, random_params(shape.config, quantize), None, (), name)


def random_params(config: ModelConfig, quantize: str | None = None) -> Any:
    """As `jaxlm.init_params` in scale, but drawn layer by layer: no more than one layer's matrix is ever wider than it
    is stored, and a quantised one is drawn as its narrow numbers."""
    tree = declare(config)
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, Param))
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(flat))
    return structure.unflatten(
        [_draw(path[-1].key, param, key, config.dtype, quantize) for (path, param), key in zip(flat, keys, strict=True)]
    )


def _draw(name: str, param: Param, key: jax.Array, dtype: str, quantize: str | None) -> Any:
    if isinstance(param.init, str):
        return jnp.full(param.shape, CONSTANTS[param.init], dtype)
    if quantize and name in MATRICES and param.shape[-1] % GROUP == 0:
        return _narrow(param.shape, param.init, key, quantize)
    return _floats(param.shape, param.init, key, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def _floats(shape: tuple[int, ...], deviation: float, key: jax.Array, dtype: str) -> jax.Array:
    """Normal numbers, one slice of the first axis after another."""
    def slice_of(key: jax.Array) -> jax.Array:
        return (deviation * jax.random.normal(key, shape[1:], jnp.float32)).astype(dtype)

    return jax.lax.map(slice_of, jax.random.split(key, shape[0]), batch_size=max(1, 2**20 // math.prod(shape[1:])))


def _narrow(shape: tuple[int, ...], deviation: float, key: jax.Array, quantize: str) -> Any:
    """Numbers of a quantised kind, with scales that give the deviation: that of even integers is 73.6 for -127..127 and
    4.61 for 0..15; for fp8, whose largest number is 448, it is 50."""
    if quantize == "fp8":
        scale = jnp.full((*shape[:-1], 1), deviation / 50, jnp.float32)
        return Q8(_floats(shape, 50.0, key, jnp.dtype(FP8).name), scale)
    scales = (*shape[:-1], shape[-1] // GROUP)
    if quantize == "int8":
        values = jax.random.randint(key, shape, -127, 128, jnp.int8)
        return Q8(values, jnp.full(scales, deviation / 73.6, jnp.float16))
    packed = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), jnp.uint8)
    scale = deviation / 4.61
    return Q4(packed, jnp.full(scales, scale, jnp.float16), jnp.full(scales, -7.5 * scale, jnp.float16))
