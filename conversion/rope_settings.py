"""Rotary settings in every spelling that published configs use.

    rope_theta at top level · rope_scaling {"rope_type" or "type": ..., ...} · rope_parameters {"rope_theta": ..., ...}
    · rope_parameters {"full_attention": {...}, "sliding_attention": {...}}

What the file says beats any default; two spellings that disagree are refused.
"""

import math
from collections.abc import Callable
from typing import Any

from jaxlm.config import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)
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


def read_local_rope(
    c: Fields, max_positions: int, default_theta: float, layer_type: str, theta_name: str
) -> RopeSpec:
    """The RopeSpec of `layer_type` where settings at the top are those of other layers: its own theta stands there
    under `theta_name`, everything else in the block of that layer type."""
    blocks = [block for outer in rope_blocks(c) if (block := outer.block(layer_type))]
    thetas = [c.number(theta_name, None), *(block.number("rope_theta", None) for block in blocks)]
    scalings = [read_scaling(block, c, max_positions) for block in blocks]
    (scaling,) = agreed(c, "rope_scaling", scalings, (None,))
    return RopeSpec(theta=agreed(c, theta_name, thetas, default_theta), scaling=scaling)


def rotary_fraction(c: Fields, default: float = 1.0, layer_type: str | None = None) -> float:
    """partial_rotary_factor, wherever it stands: the share of a head's lanes that turn."""
    found = [b.number("partial_rotary_factor", None) for b in (c, *rope_blocks(c, layer_type))]
    value = agreed(c, "partial_rotary_factor", found, default)
    if not 0 < value <= 1:
        raise ConfigError(f"{c.where}: field 'partial_rotary_factor' is {value}; allowed: above 0, at most 1")
    return value


def rotary_dims(c: Fields, head_dim: int, default: float = 1.0) -> int:
    """How many lanes of a head turn; `default` is the share in a config.json that does not say, not in a GGUF file."""
    if c.kind != "hf":
        return round(head_dim * rotary_fraction(c))
    dims = int(head_dim * rotary_fraction(c, default))
    if dims < 2:
        raise ConfigError(f"{c.where}: partial_rotary_factor leaves {dims} lanes of {head_dim}; allowed: at least 2")
    return dims


def share(dims: int, head_dim: int) -> float:
    """The partial_rotary_factor that `rotary_dims` turns into dims."""
    fraction = dims / head_dim
    return fraction if int(head_dim * fraction) == dims else math.nextafter(fraction, 1.0)


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


def _dynamic(block: Fields, c: Fields, max_positions: int) -> DynamicScaling:
    return DynamicScaling(block.number("factor"), max_positions)


def _llama3(block: Fields, c: Fields, max_positions: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=block.number("factor"),
        low_freq_factor=block.number("low_freq_factor"),
        high_freq_factor=block.number("high_freq_factor"),
        original_max_positions=original_positions(block, c, max_positions),
    )


def _yarn(block: Fields, c: Fields, max_positions: int) -> YarnScaling:
    original = original_positions(block, c, max_positions)
    factor = block.number("factor", max_positions / original)
    scales = [block.number(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if c.kind == "gguf":
        scales[0] = scales[1]  # Such files name one of the two, since published models have them alike.
    grown = [mscale(factor, scale) for scale in scales] if all(scales) else [mscale(factor, 1.0), 1.0]
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        attention_factor=block.number("attention_factor", grown[0] / grown[1]),
        beta_fast=block.number("beta_fast", 32.0),
        beta_slow=block.number("beta_slow", 1.0),
        truncate=block.flag("truncate", True),
    )


def mscale(factor: float, scale: float) -> float:
    """How much attention is sharpened for a context grown by `factor` (YaRN, equation 22)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(block: Fields, c: Fields, max_positions: int) -> LongRopeScaling | FactorScaling:
    original = original_positions(block, c, max_positions)
    factor = block.number("factor", max_positions / original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    attention = block.number("attention_factor", grown)
    short, long = block.numbers("short_factor"), block.numbers("long_factor")
    if short == long and attention == 1.0:
        return FactorScaling(short)  # What a GGUF file's own tensor of divisors becomes on export.
    return LongRopeScaling(short, long, original, attention)


def _proportional(block: Fields, c: Fields, max_positions: int) -> LinearScaling | None:
    """Which lanes turn is `RopeSpec.angles`, from `rotary_fraction`; the rest is plain interpolation."""
    factor = block.number("factor", 1.0)
    return None if factor == 1.0 else LinearScaling(factor)


SCALINGS: dict[str, Callable[[Fields, Fields, int], RopeScaling | None]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # Its name before the paper.
    "proportional": _proportional,
}


def describe_rope(spec: RopeSpec, max_positions: int, head_dim: int) -> dict[str, Any]:
    """The fields that `read_rope` turns into this spec, in the older and in the newer spelling."""
    scaling = describe_scaling(spec.scaling, max_positions)
    older = {"rope_scaling": scaling} if spec.scaling else {}
    partial = {"partial_rotary_factor": share(spec.dims, head_dim)} if spec.dims not in (0, head_dim) else {}
    newer = {"rope_theta": spec.theta, **partial, **scaling}
    return {"rope_theta": spec.theta, **partial, "rope_parameters": newer, **older}


def describe_scaling(scaling: RopeScaling | None, max_positions: int) -> dict[str, Any]:
    original = "original_max_position_embeddings"
    match scaling:
        case LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case DynamicScaling(factor, _):
            return {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling(factor, low, high, positions):
            bounds = {"low_freq_factor": low, "high_freq_factor": high}
            return {"rope_type": "llama3", "factor": factor, **bounds, original: positions}
        case YarnScaling(factor, positions, attention, fast, slow, truncate):
            rest = {"attention_factor": attention, "beta_fast": fast, "beta_slow": slow, "truncate": truncate}
            return {"rope_type": "yarn", "factor": factor, original: positions, **rest}
        case LongRopeScaling(short, long, positions, attention):
            both = {"short_factor": list(short), "long_factor": list(long)}
            return {"rope_type": "longrope", **both, "attention_factor": attention, original: positions}
        case FactorScaling(factors):
            both = {"short_factor": list(factors), "long_factor": list(factors)}
            return {"rope_type": "longrope", **both, "attention_factor": 1.0, original: max_positions}
        case None:
            return {"rope_type": "default"}
