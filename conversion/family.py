"""What a model family is to the converter: one frozen value, read by the engine, with no code of its own to run twice.

A family module in `families/` defines `FAMILY` (or `FAMILIES`, a tuple) and nothing else needs to change.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxlm.config import ModelConfig
from jaxlm.conversion.fields import Fields
from jaxlm.conversion.transforms import Same, Transform

Names = str | tuple[str, ...]
SAME = Same()


@dataclass(frozen=True)
class Row:
    """target <- source, through a transform.

    target: a leaf, "embed.table" at the top or "attn.q" in every layer; several for one source that holds them all.
    source: a tensor's name. {i} is the layer's number: a name with it is a row of every layer. {e} is an expert's (or
    a head's): the row then fills one expert's share of a leaf whose first axis counts them.
    A row counts only where the config has all its targets and `when` agrees. Of several rows for the same target, the
    first whose sources are all in the file is used; export writes the first.
    """

    target: Names
    source: Names
    transform: Transform = SAME
    when: Callable[[ModelConfig], bool] = lambda config: True

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,) if isinstance(self.target, str) else self.target

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,) if isinstance(self.source, str) else self.source

    @property
    def per_layer(self) -> bool:
        return "{i}" in self.sources[0]

    @property
    def per_expert(self) -> bool:
        return "{e}" in self.sources[0]


@dataclass(frozen=True)
class Family:
    """One group of published models that share a config format and tensor names.

    translate       the config's fields -> ModelConfig; GGUF metadata arrives under the same field names
    describe        ModelConfig -> the fields of config.json, the inverse of translate (None: no export from GGUF)
    architectures   the class names in config.json that are causal language models; the first is written on export
    rows            the Hugging Face tensor table
    gguf            the GGUF architecture names served; gguf_rows their table (see `gguf_names.gguf_rows`)
    gguf_when       whether this family serves a file of one of these architectures, from its fields (llama: no experts)
    gguf_fields     further fields from (metadata without the architecture's prefix, tensor names); they win
    aliases         config field names of this family -> the common ones, under which translate and describe see them
    gguf_names      metadata names without prefix -> config field names, where they differ from the common table
    harmless        config fields that cannot change a logit, beyond the common ones
    neutral         config fields that are understood only with this value (one, or a tuple of them)
    ignored         patterns (fnmatch) of tensors that are in files but carry nothing
    unused          further such patterns, from the config: what some layers have no use for
    prefixes        ways in which files begin their tensor names instead of prefixes[0], the way rows are written
    multimodal      model_types of configs that hold one of this family as text_config, beside towers of other kinds
    quantization    values of quantization_config.quant_method that rows of this family read
    """

    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    translate: Callable[[Fields], ModelConfig]
    rows: tuple[Row, ...]
    describe: Callable[[ModelConfig], dict[str, Any]] | None = None
    gguf: tuple[str, ...] = ()
    gguf_rows: tuple[Row, ...] = ()
    gguf_when: Callable[[Fields], bool] = lambda fields: True
    gguf_fields: Callable[[Mapping[str, Any], frozenset[str]], dict[str, Any]] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    neutral: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    unused: Callable[[ModelConfig], Iterable[str]] = lambda config: ()
    prefixes: tuple[str, ...] = ("",)
    multimodal: tuple[str, ...] = ()
    quantization: tuple[str, ...] = ()


def translated(family: Family, fields: Fields) -> ModelConfig:
    """The config that the fields describe. Raises ConfigError for a field that is not understood."""
    fields = fields.renamed(family.aliases)
    config = family.translate(fields)
    fields.finish(family.harmless, family.neutral)
    return config


def described(
    family: Family, config: ModelConfig, eos_ids: tuple[int, ...] = (), bos_ids: tuple[int, ...] = ()
) -> dict[str, Any]:
    """A config.json for a model that came without one; {} where the family cannot describe it."""
    if family.describe is None:
        return {}
    eos = eos_ids[0] if len(eos_ids) == 1 else list(eos_ids) or None
    ids = {"bos_token_id": bos_ids[0] if bos_ids else None, "eos_token_id": eos}
    head = {"model_type": family.model_types[0], "architectures": [family.architectures[0]]}
    names = {common: name for name, common in reversed(list(family.aliases.items()))}
    described = {names.get(name, name): value for name, value in family.describe(config).items()}
    return {**head, **ids, "torch_dtype": config.dtype, **described}
