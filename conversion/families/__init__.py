"""One small declarative module per family of published models: config translation and tensor-name tables.

A module here that defines `FAMILY`, or `FAMILIES` (a tuple), is found by being here.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from jaxlm.conversion.family import Family
from jaxlm.conversion.fields import HARMLESS, Fields
from jaxlm.errors import ConfigError

# Known models whose mixers the core does not have.
_NOT_BUILT = """
    bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 lfm2_moe mamba mamba2 minimax nemotron_h
    qwen3_5 qwen3_5_moe qwen3_5_text qwen3_5_moe_text qwen3_next recurrent_gemma rwkv zamba zamba2
    lfm2moe nemotron_h_moe qwen3next qwen35 qwen35moe rwkv6 rwkv7 granitehybrid
"""
# Fields of a multimodal config.json that say nothing of its language model.
_TOWERS = """
    text_config vision_config audio_config image_token_id image_token_index video_token_id audio_token_id boi_token_id
    boi_token_index eoi_token_id eoi_token_index boa_token_id eoa_token_id eoa_token_index mm_tokens_per_image
    vision_soft_tokens_per_image
"""
NOT_BUILT = frozenset(_NOT_BUILT.split())


@functools.cache
def families() -> tuple[Family, ...]:
    """Every family, one module after another by name."""
    found: list[Family] = []
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        loaded = importlib.import_module(f"{__name__}.{module}")
        found += [loaded.FAMILY] if hasattr(loaded, "FAMILY") else loaded.FAMILIES
    return tuple(found)


def by_model_type(name: object) -> Family:
    """The family of a config.json's model_type."""
    found = [family for family in families() if name in family.model_types]
    if not found:
        raise _unknown("model_type", name, {n for family in families() for n in family.model_types})
    return found[0]


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the language model alone, where the published one also describes towers that feed it.

    What stands beside text_config and says nothing of a tower is kept, so that it is read or refused like any field.
    """
    found = [family for family in families() if config.get("model_type") in family.multimodal]
    text = config.get("text_config")
    if not found or text is None:
        return config
    family = found[0]
    if not isinstance(text, dict) or text.get("model_type", family.model_types[0]) not in family.model_types:
        kind = text.get("model_type") if isinstance(text, dict) else text
        raise ConfigError(f"text_config.model_type is {str(kind)[:80]!r}; allowed: {', '.join(family.model_types)}")
    shared = {name: value for name, value in config.items() if name not in _TOWERS.split() and value is not None}
    for name in shared.keys() - HARMLESS:
        if text.get(name) not in (None, shared[name]):
            raise ConfigError(f"{name!r} is {shared[name]} and in text_config {text[name]}; allowed: one value")
    return {**text, **shared, "model_type": family.model_types[0], "architectures": list(family.architectures[:1])}


def by_gguf(arch: str, fields: Fields) -> Family:
    """The family of a GGUF file's general.architecture; `fields` settle it where several families write the same."""
    named = [family for family in families() if arch in family.gguf]
    if not named:
        raise _unknown("general.architecture", arch, {n for family in families() for n in family.gguf})
    found = [family for family in named if family.gguf_when(fields)]
    if not found:
        raise ConfigError(f"general.architecture is {arch!r} in a variant that jaxlm does not read")
    return found[0]


def _unknown(field: str, name: object, known: set[str]) -> ConfigError:
    kind = "a known model that is not built yet" if str(name) in NOT_BUILT else "not supported"
    return ConfigError(f"{field} is {str(name)[:80]!r}, {kind}; allowed: {', '.join(sorted(known))}")
