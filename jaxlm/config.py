"""The structure of a model: frozen, hashable, complete, static under `jit`.

A `ModelConfig` is a few numbers and a tuple of `LayerSpec`s. It speaks of mechanisms (norms, windows, rotary
embeddings), never of model families. Whatever is contradictory or out of range is refused when the object is made.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxlm.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("default", "high", "highest")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def _check(ok: bool, where: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{where} is {value!r}; allowed: {allowed}")


def _check_count(where: str, value: object, least: int = 1) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _check(ok, where, value, f"an integer of at least {least}")


def _check_number(where: str, value: object, least: float = 0.0) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > least
    _check(ok, where, value, f"a finite number above {least:g}")


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm ("rms", Zhang & Sennrich 2019) or LayerNorm ("layer", Ba et al. 2016)."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    bias: bool = False

    def __post_init__(self) -> None:
        _check(self.kind in ("rms", "layer"), "NormSpec.kind", self.kind, "rms, layer")
        _check_number("NormSpec.eps", self.eps, least=-1e-30)


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023)."""

    factor: float

    def __post_init__(self) -> None:
        _check_number("LinearScaling.factor", self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """The Llama 3.1 rule: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        _check_number("Llama3Scaling.factor", self.factor)
        _check_number("Llama3Scaling.low_freq_factor", self.low_freq_factor)
        ok = self.high_freq_factor > self.low_freq_factor
        _check(ok, "Llama3Scaling.high_freq_factor", self.high_freq_factor, "a number above low_freq_factor")
        _check_count("Llama3Scaling.original_max_positions", self.original_max_positions)


@dataclass(frozen=True)
class FactorScaling:
    """Each frequency i divided by `factors[i]`, as files that store the divisors themselves do."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        for i, factor in enumerate(self.factors):
            _check_number(f"FactorScaling.factors[{i}]", factor)


RopeScaling = LinearScaling | Llama3Scaling | FactorScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021) over all lanes of a head, lane i paired with lane i + h/2."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _check_number("RopeSpec.theta", self.theta)


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention. num_kv_heads = num_heads is MHA, 1 is MQA, between is GQA (Ainslie et al. 2023).

    rope None means no positions. window W > 0 lets a query see itself and the W - 1 tokens before it; 0 is no limit.
    scale None means head_dim ** -0.5.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None = field(default_factory=RopeSpec)
    qkv_bias: bool = False
    out_bias: bool = False
    window: int = 0
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            _check_count(f"AttentionSpec.{name}", getattr(self, name))
        _check_count("AttentionSpec.window", self.window, least=0)
        ok = self.num_heads % self.num_kv_heads == 0
        _check(ok, "AttentionSpec.num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}")
        ok = self.rope is None or self.head_dim % 2 == 0
        _check(ok, "AttentionSpec.head_dim", self.head_dim, "an even number when rope is on")
        if self.rope and isinstance(self.rope.scaling, FactorScaling):
            factors = len(self.rope.scaling.factors)
            _check(factors == self.head_dim // 2, "FactorScaling.factors has length", factors, f"{self.head_dim // 2}")
        if self.scale is not None:
            _check_number("AttentionSpec.scale", self.scale)

    @property
    def softmax_scale(self) -> float:
        """What the scores q.k are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True)
class FFNSpec:
    """Gated: down(act(gate(x)) * up(x)) (Shazeer 2020). Not gated: down(act(up(x)))."""

    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        _check_count("FFNSpec.intermediate_size", self.intermediate_size)
        _check(self.activation in ACTIVATIONS, "FFNSpec.activation", self.activation, ", ".join(ACTIVATIONS))


@dataclass(frozen=True)
class LayerSpec:
    """One block: x + post(attention(pre(x))), then x + post(ffn(pre(x))); pre and post are norms or nothing."""

    attention: AttentionSpec
    ffn: FFNSpec
    norm: NormSpec = field(default_factory=NormSpec)
    pre_norm: bool = True
    post_norm: bool = False

    def __post_init__(self) -> None:
        _check(self.pre_norm or self.post_norm, "LayerSpec.pre_norm", self.pre_norm, "True unless post_norm is")


@dataclass(frozen=True)
class Segment:
    """A unit of layers that is repeated: its parameters are stacked along the repeat axis and run by one scan."""

    unit: tuple[LayerSpec, ...]
    repeat: int


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a decoder model that is not an array.

    hidden_size is D, vocab_size V. tie_embeddings: the head reuses the embedding table (one leaf).
    dtype is that of parameters and activations; precision is the `jax.lax.Precision` of every matrix product.
    max_positions is the longest context that the model was made for.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec = field(default_factory=NormSpec)
    tie_embeddings: bool = False
    max_positions: int = 2048
    dtype: str = "float32"
    precision: str = "default"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_positions"):
            _check_count(f"ModelConfig.{name}", getattr(self, name))
        _check(len(self.layers) > 0, "ModelConfig.layers", self.layers, "at least one LayerSpec")
        _check(self.dtype in DTYPES, "ModelConfig.dtype", self.dtype, ", ".join(DTYPES))
        _check(self.precision in PRECISIONS, "ModelConfig.precision", self.precision, ", ".join(PRECISIONS))
        # Dispatch of a jitted function hashes its static arguments on every call.
        values = tuple(getattr(self, f.name) for f in dataclasses.fields(self))
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers as the shortest run of repeated units."""
        return find_segments(self.layers)


@functools.lru_cache(maxsize=64)
def find_segments(layers: tuple[LayerSpec, ...]) -> tuple[Segment, ...]:
    """Cover the layers with repeated units so that the bodies to compile, then the segments, are fewest."""
    best: list[tuple[tuple[int, int], tuple[Segment, ...]]] = [((0, 0), ())]
    for end in range(1, len(layers) + 1):
        candidates = []
        for size in range(1, end + 1):
            unit = layers[end - size : end]
            repeat = 1
            while True:
                start = end - size * repeat
                (bodies, count), before = best[start]
                candidates.append(((bodies + size, count + 1), (*before, Segment(unit, repeat))))
                if start < size or layers[start - size : start] != unit:
                    break
                repeat += 1
        best.append(min(candidates, key=lambda c: c[0]))
    return best[-1][1]


SPECS = {c.__name__: c for c in (NormSpec, LinearScaling, Llama3Scaling, FactorScaling, RopeSpec, AttentionSpec,
                                 FFNSpec, LayerSpec, ModelConfig)}  # fmt: skip


def to_dict(spec: Any) -> Any:
    """A spec as plain dicts and lists for JSON; each dict names its class under "spec"."""
    if dataclasses.is_dataclass(spec):
        fields = {f.name: to_dict(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        return {"spec": type(spec).__name__, **fields}
    return [to_dict(item) for item in spec] if isinstance(spec, tuple) else spec


def from_dict(data: Any) -> Any:
    """The inverse of `to_dict`. Raises ConfigError for an unknown class or field."""
    if isinstance(data, list):
        return tuple(from_dict(item) for item in data)
    if not isinstance(data, dict):
        return data
    kind = data.get("spec")
    if kind not in SPECS:
        raise ConfigError(f"config: unknown spec {kind!r}; allowed: {', '.join(SPECS)}")
    fields = {name: from_dict(value) for name, value in data.items() if name != "spec"}
    unknown = sorted(fields.keys() - {f.name for f in dataclasses.fields(SPECS[kind])})
    if unknown:
        raise ConfigError(f"config: {kind} has no field {unknown[0]!r}")
    try:
        return SPECS[kind](**fields)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"config: {kind}: {error}") from error
