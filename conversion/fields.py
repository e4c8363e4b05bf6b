"""Reading a published config so that nothing in it goes unnoticed.

Every field that a family reads is recorded; `finish` refuses whatever was neither read nor named as harmless.
"""

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxlm.config import MOST_LAYERS
from jaxlm.errors import ConfigError

REQUIRED: Any = object()

# Fields of any family that cannot change a logit: bookkeeping, training, generation defaults, special ids.
_HARMLESS = """
    _attn_implementation _commit_hash _name_or_path architectures attention_dropout attn_implementation auto_map
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id do_sample dtype
    early_stopping eos_token_id finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout id2label
    initializer_range is_decoder label2id length_penalty max_length max_new_tokens min_length model_type
    no_repeat_ngram_size num_beams num_labels num_return_sequences output_attentions output_hidden_states
    output_router_logits pad_token_id prefix problem_type repetition_penalty return_dict sep_token_id
    suppress_tokens task_specific_params temperature tokenizer_class top_k top_p torch_dtype transformers_version
    typical_p unsloth_fixed unsloth_version use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())
# Fields of any family that are understood only when they say that they do nothing.
NEUTRAL: Mapping[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "torchscript": False,
    "use_bfloat16": False,
}
# More than any model has: what is built per layer or per expert before the tensors are seen stays small.
MOST: Mapping[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), MOST_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 10_000),
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


class Fields:
    """A config's fields. kind is "hf" or "gguf": what the config came from, for the few settings that differ.

    A field that is null counts as absent, unless `null` says what null means. Every method raises ConfigError naming
    the field, its value and what is allowed.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str = "config.json", kind: str = "hf", prefix: str = ""
    ) -> None:
        self.values, self.where, self.kind, self.prefix = values, where, kind, prefix
        self.seen: set[str] = set()
        self.blocks: dict[str, Fields] = {}
        self.spelled: dict[str, str] = {}

    def renamed(self, names: Mapping[str, str]) -> "Fields":
        """The same fields, those of `names` (as published -> common) under the common one; errors say the published."""
        result = Fields(self.values, self.where, self.kind, self.prefix)
        result.values = {name: value for name, value in self.values.items() if name not in names}
        for name, common in names.items():
            if name not in self.values or (common in result and name not in self):
                continue
            if common in result and result.values[common] != self.values[name]:
                raise self.error(name, f"{result.values[common]}, as {result.spelled.get(common, common)!r} says")
            result.values = {**result.values, common: self.values[name]}
            result.spelled[common] = name
        return result

    def __contains__(self, name: str) -> bool:
        """Whether the field is there and not null. Does not count as reading it."""
        return self.values.get(name) is not None

    def error(self, name: str, allowed: str) -> ConfigError:
        value = str(self.values.get(name))
        shown = value if len(value) <= 80 else value[:77] + "..."
        spelled = self.prefix + self.spelled.get(name, name)
        return ConfigError(f"{self.where}: field {spelled!r} is {shown}; allowed: {allowed}")

    def any(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """The value as it is."""
        self.seen.add(name)
        if name in self.values and (self.values[name] is not None or null is not REQUIRED):
            return null if self.values[name] is None else self.values[name]
        if default is REQUIRED:
            raise ConfigError(f"{self.where}: field {self.prefix + name!r} is missing")
        return default

    def count(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED, least: int = 1) -> int:
        """An integer of at least `least`, and at most what `MOST` says."""
        value, most = self.any(name, default, null), MOST.get(name, 1 << 40)
        if name in self and (type(value) is not int or not least <= value <= most):
            raise self.error(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED) -> float:
        """A finite number, as a float."""
        value = self.any(name, default, null)
        if name not in self:
            return value
        if not _finite(value):
            raise self.error(name, "a finite number")
        return float(value)

    def numbers(self, name: str, default: Any = REQUIRED) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self.any(name, default)
        if name in self and not _all(value, _finite):
            raise self.error(name, "a list of finite numbers")
        return tuple(float(v) for v in value)

    def flag(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED) -> bool:
        value = self.any(name, default, null)
        if name in self and type(value) is not bool:
            raise self.error(name, "true, false")
        return value

    def text(self, name: str, allowed: Collection[str], default: Any = REQUIRED, null: Any = REQUIRED) -> str:
        """One of the strings in `allowed`."""
        value = self.any(name, default, null)
        if name in self and (not isinstance(value, str) or value not in allowed):
            raise self.error(name, ", ".join(sorted(allowed)))
        return value

    def texts(self, name: str, allowed: Collection[str], length: int, default: Any = REQUIRED) -> tuple[str, ...]:
        """A list of `length` strings, each one of `allowed` (such as layer_types)."""
        value = self.any(name, default)
        if name in self and (not _all(value, lambda v: isinstance(v, str) and v in allowed) or len(value) != length):
            raise self.error(name, f"a list of {length} of: {', '.join(sorted(allowed))}")
        return tuple(value)

    def activation(self, name: str, default: Any = REQUIRED) -> Any:
        """The name of an activation function, as `FFNSpec.activation` calls it."""
        return ACTIVATIONS[self.text(name, ACTIVATIONS, default)]

    def block(self, name: str) -> "Fields | None":
        """A nested object, None where absent; its own fields are accounted for by `finish` too."""
        value = self.any(name, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        if name not in self.blocks:
            self.blocks[name] = Fields(value, self.where, self.kind, f"{self.prefix}{name}.")
        return self.blocks[name]

    def finish(self, harmless: Iterable[str] = (), neutral: Mapping[str, Any] | None = None) -> None:
        """Refuse a field that was not read, is not harmless and does not hold its neutral value (one, or a tuple)."""
        known = self.seen | HARMLESS | set(harmless)
        neutral = {**NEUTRAL, **(neutral or {})}
        for name in self.values:
            if name in known or name not in self:
                continue
            if name not in neutral:
                raise self.error(name, "nothing: jaxlm does not know this field, and it may change the numbers")
            values = neutral[name] if isinstance(neutral[name], tuple) else (neutral[name],)
            if self.values[name] not in values:
                raise self.error(name, ", ".join(str(v) for v in values))
        for block in self.blocks.values():
            block.finish(harmless, neutral)


def _finite(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _all(value: Any, test: Any) -> bool:
    return isinstance(value, list) and all(test(v) for v in value)
