"""The structure of a model: frozen, hashable, complete, static under `jit`.

A `ModelConfig` is a few numbers and a tuple of `LayerSpec`s. It speaks of mechanisms (norms, windows, rotary
embeddings), never of model families. Whatever is contradictory or out of range is refused when the object is made.
"""

import dataclasses
import functools
import sys
import typing
from dataclasses import dataclass, field
from typing import Any

from jaxlm.errors import ConfigError
from jaxlm.spec import (
    AttentionSpec,
    DynamicScaling,
    FactorScaling,
    FFNSpec,
    LatentAttentionSpec,
    LayerInput,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MoESpec,
    NormSpec,
    QueryScaling,
    RopeScaling,
    RopeSpec,
    RouterSpec,
    YarnScaling,
    check,
    check_choice,
    check_count,
    check_number,
)

__all__ = [
    "AttentionSpec", "DynamicScaling", "FFNSpec", "FactorScaling", "LatentAttentionSpec", "LayerInput", "LayerSpec",
    "LearnedPositions", "LinearScaling", "Llama3Scaling", "LongRopeScaling", "MoESpec", "ModelConfig", "NormSpec",
    "QueryScaling", "RopeScaling", "RopeSpec", "RouterSpec", "Segment", "YarnScaling",
]  # fmt: skip

DTYPES = ("float32", "bfloat16", "float16")
MOST_LAYERS = 1000  # Finding how layers repeat takes the square of their number.
PRECISIONS = ("default", "high", "highest")


@dataclass(frozen=True)
class LayerSpec:
    """One block: x + post(attention(pre(x))), then x + post(ffn(pre(x))); pre and post are norms or nothing.

    parallel: both work on x, and the results are added: x + attention(pre(x)) + ffn(pre(x)); with shared_norm one pre
    serves both. residual_scale multiplies what each branch adds.
    beside: a mixture of experts on the same residual x as ffn; the branch is then norm(ffn(pre(x))) +
    norm(experts(norm(x))), its router seeing x itself. layer_input: see there. output_scale: the layer's whole output
    is multiplied by a learned number.
    """

    attention: AttentionSpec | LatentAttentionSpec
    ffn: FFNSpec | MoESpec
    norm: NormSpec = field(default_factory=NormSpec)
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0
    beside: MoESpec | None = None
    layer_input: LayerInput | None = None
    output_scale: bool = False

    def __post_init__(self) -> None:
        check(self.pre_norm or self.post_norm, "LayerSpec.pre_norm", self.pre_norm, "True unless post_norm is")
        ok = not self.shared_norm or (self.parallel and self.pre_norm)
        check(ok, "LayerSpec.shared_norm", self.shared_norm, "False unless parallel and pre_norm")
        check_number("LayerSpec.residual_scale", self.residual_scale)


@dataclass(frozen=True)
class LearnedPositions:
    """A learned vector per position, added to the embedding: row position + offset of a table of `count` rows."""

    count: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_count("LearnedPositions.count", self.count)
        check_count("LearnedPositions.offset", self.offset, least=0)


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
    embed_scale multiplies embeddings, rounded to dtype first. embed_norm normalises them. head_bias: a bias per logit.
    Logits are multiplied by logit_scale; then, with logit_softcap c > 0, they become c * tanh(logit / c).
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec = field(default_factory=NormSpec)
    tie_embeddings: bool = False
    max_positions: int = 2048
    dtype: str = "float32"
    precision: str = "default"
    embed_scale: float = 1.0
    embed_norm: NormSpec | None = None
    positions: LearnedPositions | None = None
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_positions"):
            check_count(f"ModelConfig.{name}", getattr(self, name))
        for name in ("embed_scale", "logit_scale"):
            check_number(f"ModelConfig.{name}", getattr(self, name))
        check_number("ModelConfig.logit_softcap", self.logit_softcap, above=-1e-30)
        ok = 0 < len(self.layers) <= MOST_LAYERS and all(isinstance(layer, LayerSpec) for layer in self.layers)
        check(ok, "ModelConfig.layers", self.layers, f"a tuple of at least one LayerSpec, at most {MOST_LAYERS}")
        check_choice("ModelConfig.dtype", self.dtype, DTYPES)
        check_choice("ModelConfig.precision", self.precision, PRECISIONS)
        if self.positions:
            room = self.positions.count - self.positions.offset
            check(self.max_positions <= room, "ModelConfig.max_positions", self.max_positions, f"up to {room} rows")
        check_sharing(self.layers)
        for layer in self.layers:
            ok = layer.layer_input == self.layers[0].layer_input
            check(ok, "LayerSpec.layer_input", layer.layer_input, "the same for all layers")

    def __hash__(self) -> int:
        # Dispatch of a jitted function hashes its static arguments on every call.
        if "_hash" not in self.__dict__:
            self.__dict__["_hash"] = hash(tuple(getattr(self, f.name) for f in dataclasses.fields(self)))
        return self.__dict__["_hash"]

    def __getstate__(self) -> dict[str, Any]:
        # Strings hash differently in every process.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers as the shortest run of repeated units."""
        return find_segments(self.layers)


def check_sharing(layers: tuple[LayerSpec, ...]) -> None:
    """Raise ConfigError unless every kv_from names an earlier layer that keeps what this one needs, and labels differ.

    Since labels differ, a layer that keeps its keys and values is not repeated in any segment.
    """
    kept: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        attention = layer.attention
        if not isinstance(attention, AttentionSpec):
            continue
        if attention.kv_from:
            known = ", ".join(kept) or "no label before this layer"
            check(attention.kv_from in kept, "AttentionSpec.kv_from", attention.kv_from, known)
            same = attention.stored == kept[attention.kv_from]
            check(same, "AttentionSpec.stored", attention.stored, f"{kept[attention.kv_from]}, as kept")
        if attention.kv_keep:
            check(attention.kv_keep not in kept, "AttentionSpec.kv_keep", attention.kv_keep, "a label of its own")
            kept[attention.kv_keep] = attention.stored


@functools.lru_cache(maxsize=64)
def find_segments(layers: tuple[LayerSpec, ...]) -> tuple[Segment, ...]:
    """Cover the layers with repeated units so that the bodies to compile, then the segments, are fewest."""
    numbers: dict[LayerSpec, int] = {}
    kinds = [numbers.setdefault(layer, len(numbers)) for layer in layers]  # Numbers compare fast.
    best = [(0, 0)]  # (bodies, segments) of the best cover of the first so many layers,
    last = [(0, 0)]  # and (size, repeat) of its last segment.
    for end in range(1, len(layers) + 1):
        cost, segment = (end, 1), (end, 1)
        for size in range(1, end + 1):
            if size > cost[0]:
                break  # No cover that ends in so large a unit has fewer bodies.
            unit, start, repeat = kinds[end - size : end], end - size, 1
            while True:
                bodies, count = best[start]
                if (bodies + size, count + 1) < cost:
                    cost, segment = (bodies + size, count + 1), (size, repeat)
                if start < size or kinds[start - size : start] != unit:
                    break
                start, repeat = start - size, repeat + 1
        best.append(cost)
        last.append(segment)
    found: list[Segment] = []
    end = len(layers)
    while end:
        size, repeat = last[end]
        found.append(Segment(layers[end - size : end], repeat))
        end -= size * repeat
    return tuple(reversed(found))


SPECS = {
    spec.__name__: spec
    for spec in (
        NormSpec, LinearScaling, DynamicScaling, Llama3Scaling, YarnScaling, LongRopeScaling, FactorScaling, RopeSpec,
        QueryScaling, AttentionSpec, LatentAttentionSpec, FFNSpec, RouterSpec, MoESpec, LayerInput, LayerSpec,
        LearnedPositions, ModelConfig,
    )
}  # fmt: skip


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
    hints = typing.get_type_hints(SPECS[kind])
    for name, value in fields.items():
        if not _fits(value, hints[name]):
            raise ConfigError(f"config: {kind}.{name} is {value!r:.80}; allowed: {hints[name]}")
    try:
        return SPECS[kind](**fields)
    except (TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"config: {kind}: {error}") from error


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that a field of a spec is declared with; a whole number may stand for a float."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return isinstance(value, str) and value in parts
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(item, parts[0]) for item in value)
    if parts:
        return any(_fits(value, part) for part in parts)
    if hint is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is hint
