"""The whole model once more in plain numpy float64, one row, one head and one position at a time.

It shares nothing with the package but the config and the layout of the parameter tree, and is written to be plainly
right: no batching, no masks (a query loops over the keys that it may see), no cache.
"""

import math

import numpy as np

from jaxlm.config import (
    AttentionSpec,
    FactorScaling,
    FFNSpec,
    LayerSpec,
    LinearScaling,
    ModelConfig,
    NormSpec,
    RopeSpec,
)


def forward(params, tokens, config: ModelConfig) -> np.ndarray:
    """Logits float64 [B,T,V] for ids [B,T]."""
    params = wide(params)
    return np.stack([forward_row(params, row, config) for row in np.asarray(tokens)])


def forward_row(params, row, config: ModelConfig) -> np.ndarray:
    xs = [params["embed"]["table"][i] for i in row]
    for spec, layer in zip(config.layers, layers_in_order(params), strict=True):
        xs = block(layer, xs, spec)
    head = params["embed"]["table"] if config.tie_embeddings else params["lm_head"]["table"]
    return np.stack([head @ norm(params["final_norm"], x, config.final_norm) for x in xs])


def wide(tree):
    """Every array as float64, exactly."""
    if isinstance(tree, dict):
        return {name: wide(value) for name, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return [wide(value) for value in tree]
    return np.asarray(tree).astype(np.float64)


def layers_in_order(params) -> list[dict]:
    """Single layers, first to last: a segment repeats its unit, so the repeats are the outer loop."""
    layers = []
    for unit in params["segments"]:
        for repeat in range(len(unit[0]["attn"]["q"])):
            layers += [take(layer, repeat) for layer in unit]
    return layers


def take(tree, index):
    return {name: take(value, index) for name, value in tree.items()} if isinstance(tree, dict) else tree[index]


def block(layer, xs, spec: LayerSpec):
    def before(name, x):
        return norm(layer[name], x, spec.norm) if spec.pre_norm else x

    def after(name, x):
        return norm(layer[name], x, spec.norm) if spec.post_norm else x

    attended = attention(layer["attn"], [before("attn_norm", x) for x in xs], spec.attention)
    xs = [x + after("attn_post_norm", a) for x, a in zip(xs, attended, strict=True)]
    return [x + after("ffn_post_norm", ffn(layer["ffn"], before("ffn_norm", x), spec.ffn)) for x in xs]


def norm(p, x, spec: NormSpec) -> np.ndarray:
    centred = x - x.sum() / len(x) if spec.kind == "layer" else x
    power = (centred**2).sum() / len(x) + spec.eps
    normed = centred / math.sqrt(power) if power > 0 else centred
    return normed * (p["scale"] + spec.unit_offset) + (p["bias"] if spec.bias else 0.0)


def attention(p, xs, spec: AttentionSpec) -> list[np.ndarray]:
    group = spec.num_heads // spec.num_kv_heads
    outs = [p["o_bias"].copy() if spec.out_bias else np.zeros(len(x)) for x in xs]
    for head in range(spec.num_heads):
        shared = head // group  # Queries of one group follow each other.
        qs = [p["q"][head] @ x + (p["q_bias"][head] if spec.qkv_bias else 0.0) for x in xs]
        ks = [p["k"][shared] @ x + (p["k_bias"][shared] if spec.qkv_bias else 0.0) for x in xs]
        vs = [p["v"][shared] @ x + (p["v_bias"][shared] if spec.qkv_bias else 0.0) for x in xs]
        if spec.rope is not None:
            qs = [rope(q, t, spec.rope) for t, q in enumerate(qs)]
            ks = [rope(k, t, spec.rope) for t, k in enumerate(ks)]
        scale = 1 / math.sqrt(spec.head_dim) if spec.scale is None else spec.scale
        for t, q in enumerate(qs):
            first = 0 if spec.window == 0 else max(0, t + 1 - spec.window)
            scores = np.array([(q @ ks[s]) * scale for s in range(first, t + 1)])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed = sum(w * vs[s] for w, s in zip(weights, range(first, t + 1), strict=True))
            outs[t] += p["o"][:, head, :] @ mixed
    return outs


def rope(x, position: int, spec: RopeSpec) -> np.ndarray:
    """Each pair of lanes (i, i + h/2) as one complex number, turned."""
    half = len(x) // 2
    turned = [complex(x[i], x[i + half]) * np.exp(1j * position * frequency(i, len(x), spec)) for i in range(half)]
    return np.array([z.real for z in turned] + [z.imag for z in turned])


def frequency(i: int, head_dim: int, spec: RopeSpec) -> float:
    plain = 1.0 / spec.theta ** (2 * i / head_dim)
    scaling = spec.scaling
    if scaling is None:
        return plain
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, FactorScaling):
        return plain / scaling.factors[i]
    length, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / plain
    if wavelength < length / high:
        return plain
    if wavelength > length / low:
        return plain / scaling.factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def ffn(p, x, spec: FFNSpec) -> np.ndarray:
    def linear(name, value):
        return p[name] @ value + (p[f"{name}_bias"] if spec.bias else 0.0)

    inner = activation(linear("gate", x), spec.activation) * linear("up", x) if spec.gated else None
    return linear("down", activation(linear("up", x), spec.activation) if inner is None else inner)


def activation(xs, name: str) -> np.ndarray:
    formulas = {
        "silu": lambda x: x / (1 + math.exp(-x)),
        "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        "relu": lambda x: x if x > 0 else 0.0,
    }
    return np.array([formulas[name](x) for x in xs])
