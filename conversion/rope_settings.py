"""Rotary settings in every spelling that published configs use.

    rope_theta at top level · rope_scaling {"rope_type" or "type": ..., ...} · rope_parameters {"rope_theta": ..., ...}
    · rope_parameters {"full_attention": {...}, "sliding_attention": {...}}

What the file says beats any default; two spellings that disagree are refused.
"""

from collections.abc import Callable
from typing import Any

from jaxlm.config import FactorScaling, LinearScaling, Llama3Scaling, RopeScaling, RopeSpec
from jaxlm.conversion.fields import Fields
from jaxlm.errors import ConfigError


def read_rope(
    c: Fields, max_positions: int, default_theta: float = 10000.0, layer_type: str | None = None, **spec: Any
) -> RopeSpec:
    """The RopeSpec of all layers, or of those of `layer_type`; `spec` holds further fields of RopeSpec."""
    blocks = rope_blocks(c, layer_type)
    thetas = [b.number("rope_theta", None) for b in (c, *blocks)]
    theta = agreed(c, "rope_theta", thetas, default_theta)
    scalings = [*(read_scaling(b, c, max_positions) for b in blocks), read_factors(c)]
    (scaling,) = agreed(c, "rope_scaling", scalings, (None,))
    return RopeSpec(theta=theta, scaling=scaling, **spec)


def rotary_fraction(c: Fields, default: float = 1.0, layer_type: str | None = None) -> float:
    """partial_rotary_factor, wherever it stands: the share of a head's lanes that turn."""
    found = [b.number("partial_rotary_factor", None) for b in (c, *rope_blocks(c, layer_type))]
    value = agreed(c, "partial_rotary_factor", found, default)
    if not 0 < value <= 1:
        raise ConfigError(f"{c.where}: field 'partial_rotary_factor' is {value}; allowed: above 0, at most 1")
    return value


def rope_blocks(c: Fields, layer_type: str | None = None) -> list[Fields]:
    """The nested objects that hold rotary settings, those of `layer_type` where they are split by layer type."""
    blocks = [block for name in ("rope_parameters", "rope_scaling") if (block := c.block(name))]
    if layer_type is None:
        return blocks
    return [block.block(layer_type) or block for block in blocks]


def agreed(c: Fields, name: str, found: list[Any], default: Any) -> Any:
    """The one value that all spellings give, those that say nothing (None) aside."""
    said = [value for value in found if value is not None]
    if any(value != said[0] for value in said):
        raise ConfigError(f"{c.where}: {name!r} is given as {said[0]} and as {said[-1]}; allowed: one value")
    return said[0] if said else default


def read_scaling(block: Fields, c: Fields, max_positions: int) -> tuple[RopeScaling | None] | None:
    """(the scaling that one block describes, None in it for the plain kind), or None where it does not say."""
    kinds = [block.text(name, SCALINGS, None) for name in ("rope_type", "type")]
    kind = agreed(block, f"{block.prefix}rope_type", kinds, None)
    return None if kind is None else (SCALINGS[kind](block, c, max_positions),)


def original_positions(block: Fields, c: Fields, max_positions: int) -> int:
    """original_max_position_embeddings, from the block or from the top level."""
    name = "original_max_position_embeddings"
    return agreed(c, name, [b.count(name, None) for b in (block, c)], max_positions)


def read_factors(c: Fields) -> tuple[RopeScaling | None] | None:
    """The divisors that a GGUF file stores as a tensor of its own, in the form of `read_scaling`."""
    return (FactorScaling(c.numbers("rope_freqs")),) if "rope_freqs" in c else None


def _default(block: Fields, c: Fields, max_positions: int) -> None:
    return None


def _linear(block: Fields, c: Fields, max_positions: int) -> LinearScaling:
    return LinearScaling(block.number("factor"))


def _llama3(block: Fields, c: Fields, max_positions: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=block.number("factor"),
        low_freq_factor=block.number("low_freq_factor"),
        high_freq_factor=block.number("high_freq_factor"),
        original_max_positions=original_positions(block, c, max_positions),
    )


def _longrope(block: Fields, c: Fields, max_positions: int) -> FactorScaling:
    """Only the case of equal factors at every length, which is `FactorScaling`."""
    short, long = block.numbers("short_factor"), block.numbers("long_factor")
    block.seen.update(("factor", "original_max_position_embeddings"))
    if short != long or block.number("attention_factor", None) != 1.0:
        raise block.error("rope_type", "for longrope: short_factor equal to long_factor, attention_factor 1.0")
    return FactorScaling(short)


SCALINGS: dict[str, Callable[[Fields, Fields, int], RopeScaling | None]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
}


def describe_rope(spec: RopeSpec, max_positions: int) -> dict[str, Any]:
    """The `rope_parameters` object that `read_rope` turns into this spec."""
    match spec.scaling:
        case None:
            scaling: dict[str, Any] = {"rope_type": "default"}
        case LinearScaling(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            scaling["original_max_position_embeddings"] = original
        case FactorScaling(factors):
            both = {"short_factor": list(factors), "long_factor": list(factors)}
            scaling = {"rope_type": "longrope", **both, "attention_factor": 1.0}
            scaling["original_max_position_embeddings"] = max_positions
    return {"rope_theta": spec.theta, **scaling}
