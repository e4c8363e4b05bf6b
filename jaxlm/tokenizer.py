"""Text to ids and back: one small `Tokenizer` over the vocabulary files that come with a checkpoint.

Special tokens. `encode(text)` reads control-token strings in the text ("<|im_end|>") as control tokens: right for raw
prompts, where the caller writes them on purpose. `encode(text, special=False)` never yields a control token: right for
text from a user. `encode_chat` does the first for the template's own words and the second for what the messages say.

Decoding is lossless: the bytes of the tokens, joined, read as UTF-8 (what is not valid UTF-8 becomes U+FFFD); the one
space that SentencePiece vocabularies add in front of a text is taken off again. No tidying of spaces around
punctuation, whatever `clean_up_tokenization_spaces` says.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxlm import chat
from jaxlm.errors import TokenizerError
from jaxlm.vocab import MARK, JsonVocab, longest_first
from jaxlm.vocab_spm import SpmVocab

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")  # Those that must not be misread.
EXTRA_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja files


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with its special tokens and chat template.

    files: the bytes it was made from, by file name; `from_files(files)` makes an equal one.
    bos_id: the begin-of-text id or None. eos_ids: every id that ends a text or a turn, the main one first.
    special_tokens: {"bos_token": "<s>", ...} as the files spell them. templates: chat templates by name.
    """

    files: Mapping[str, bytes] = field(repr=False)
    bos_id: int | None
    eos_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str] = field(repr=False)
    prefix: tuple[int, ...] = ()  # ids that the files put before a text, usually the one BOS
    suffix: tuple[int, ...] = ()
    _vocab: Any = field(default=None, repr=False)
    _bytes: dict[int, bytes] = field(default_factory=dict, repr=False)  # cache of token_bytes

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "Tokenizer":
        """Make it from the contents of `TOKENIZER_FILES`; tokenizer.json wins over tokenizer.model.

        A "config.json" among them is read for its eos_token_id only and not kept; if it names ids that the others do
        not, the kept generation_config.json is widened by them. Raises TokenizerError on a damaged file.
        """
        config, generation, model = (
            _json(files, name) for name in ("tokenizer_config.json", "generation_config.json", "config.json")
        )
        special = _special_tokens(_json(files, "special_tokens_map.json") | config)
        vocab = _vocab_of(files, config, special)
        kept = {name: bytes(data) for name, data in files.items() if name != "config.json"}
        eos, known = _eos_ids(vocab, special, generation, model), _eos_ids(vocab, special, generation, {})
        if eos != known:
            kept["generation_config.json"] = json.dumps(generation | {"eos_token_id": list(eos)}).encode()
        return cls(
            files=kept,
            bos_id=_bos_id(vocab, special, generation, model),
            eos_ids=eos,
            special_tokens=special,
            templates=_templates(files, config),
            prefix=vocab.prefix,
            suffix=vocab.suffix,
            _vocab=vocab,
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer files of a checkpoint folder. Raises TokenizerError if it has no vocabulary file."""
        folder = Path(path)
        names = [*TOKENIZER_FILES, "config.json"]
        names += [f"{EXTRA_TEMPLATES}/{p.name}" for p in sorted((folder / EXTRA_TEMPLATES).glob("*.jinja"))]
        files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
        if "tokenizer.json" not in files and "tokenizer.model" not in files:
            raise TokenizerError(f"{folder} has no vocabulary: needs tokenizer.json or tokenizer.model.")
        return cls.from_files(files)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token."""
        return max(self._vocab.ids_with_token, default=-1) + 1

    def has_token(self, token: int) -> bool:
        return token in self._vocab.ids_with_token

    def token_mask(self, size: int) -> np.ndarray:
        """bool [size]: which ids have a token. A model may have more rows than its vocabulary has tokens."""
        mask = np.zeros(size, bool)
        ids = np.fromiter(self._vocab.ids_with_token, np.int64)
        mask[ids[ids < size]] = True
        return mask

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it ("\u2581the", "\u0120the", "<s>"), or "" where there is none."""
        return self._vocab.token_text(int(token)) or ""

    def token_bytes(self, token: int, *, keep_special: bool = True) -> bytes:
        """The UTF-8 bytes that a token stands for; none for an id without a token, or for a control token not kept."""
        added = self._vocab.added.get(token)
        if added is not None and added.special and not keep_special:
            return b""
        if token not in self._bytes:
            self._bytes[token] = self._vocab.token_bytes(token)
        return self._bytes[token]

    @property
    def strips_space(self) -> bool:
        """Whether the first space of a decoded text is the vocabulary's own and is taken off."""
        return self._vocab.strip_space

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The control ids."""
        return frozenset(i for i, token in self._vocab.added.items() if token.special)

    @property
    def chat_template(self) -> str | None:
        return self.templates.get("default")

    def encode(self, text: str, *, bos: bool = True, special: bool = True) -> list[int]:
        """Ids of a text.

        bos: put the ids around it that the files ask for (usually one BOS, or nothing), but no second BOS where the
        text already begins with one. special: read control-token strings in the text as control tokens.
        """
        text = _valid(text)
        if special:
            return self._framed(self._vocab.encode(text), bos)
        guarded = chat.guarded_tokens(self._vocab.added.values(), self.chat_template)
        marked = chat.mark(text, longest_first(guarded))
        return self._framed(self._encode_marked(marked, guarded) if marked != text else self._vocab.encode(text), bos)

    def _framed(self, ids: list[int], bos: bool) -> list[int]:
        if not bos:
            return ids
        prefix = list(self.prefix)
        suffix = list(self.suffix)
        ids = ids if prefix and ids[: len(prefix)] == prefix else prefix + ids
        return ids if suffix and ids[-len(suffix) :] == suffix else ids + suffix

    def _encode_marked(self, text: str, guarded: frozenset[str]) -> list[int]:
        return self._vocab.encode_marked(text, guarded) if MARK in text else self._vocab.encode(text)

    def decode(self, ids: Iterable[int], *, keep_special: bool = False) -> str:
        """Text of ids, without control tokens unless kept. Ids that have no token add nothing."""
        data = b"".join(self.token_bytes(int(i), keep_special=keep_special) for i in ids)
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_space else text

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The chat template applied to messages; options as for `jaxlm.chat.render_chat`."""
        return chat.render_chat(self._template(options), messages, **{**self.special_tokens, **options})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of a chat: control tokens come from the template only, never from what a message says.

        Adds no BOS of its own: a chat template writes everything that its model expects.
        """
        template = self._template(options)
        added = list(self._vocab.added.values())
        guarded = chat.guarded_tokens(added, template)
        control = frozenset(token.text for token in added if token.special)
        messages = chat.mark_messages(messages, longest_first(guarded), longest_first(control))
        options = chat.mark(options, longest_first(guarded))
        text = chat.render_chat(template, messages, **{**self.special_tokens, **options})
        return self._encode_marked(_valid(text), guarded)

    def _template(self, options: dict[str, Any]) -> str:
        name = "tool_use" if options.get("tools") and "tool_use" in self.templates else "default"
        if name not in self.templates:
            has = f"only templates named {sorted(self.templates)}" if self.templates else "no chat template"
            raise TokenizerError(f"This tokenizer has {has}; give the prompt as plain text.")
        return self.templates[name]


def _valid(text: str) -> str:
    """Lone surrogates (from broken input) cannot be written as UTF-8: they become U+FFFD."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace") if not text.isascii() else text


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        value = json.loads(files[name], object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False).encode()  # Half a surrogate pair is no text.
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{name} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{name} holds a {type(value).__name__}; it must be a JSON object.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if found.setdefault(name, value) != value:
            raise ValueError(f"{name!r:.80} is there twice")
    return found


def _check(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise TokenizerError(f"field {name!r} of the tokenizer's settings is {value!r:.80}; allowed: {allowed}.")


def _vocab_of(files: Mapping[str, bytes], config: Mapping[str, Any], special: Mapping[str, str]) -> Any:
    if "tokenizer.json" in files:
        return JsonVocab(bytes(files["tokenizer.json"]))
    if "tokenizer.model" not in files:
        raise TokenizerError(f"No vocabulary among {sorted(files)}: needs tokenizer.json or tokenizer.model.")
    legacy = config.get("legacy")
    _check(legacy is None or isinstance(legacy, bool), "legacy", legacy, "true, false")
    vocab = SpmVocab(bytes(files["tokenizer.model"]), config)
    for side, name, wanted in (("prefix", "bos", True), ("suffix", "eos", False)):
        flag = config.get(f"add_{name}_token")
        _check(flag is None or isinstance(flag, bool), f"add_{name}_token", flag, "true, false")
        if wanted if flag is None else flag:
            token = vocab.token_id(special[f"{name}_token"]) if f"{name}_token" in special else vocab.core_id(name)
            setattr(vocab, side, () if token is None else (token,))
    return vocab


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The *_token entries; a token may be given as a string or as {"content": ...}, null is none."""
    out = {}
    for name, value in config.items():
        if name.endswith("_token") and not name.startswith("add_"):
            text = value.get("content") if isinstance(value, dict) else value
            known = value is None or isinstance(text, str) or name not in SPECIAL
            _check(known, name, value, "a token's text, alone or as the content of an object")
            if isinstance(text, str):
                out[name] = text
    return out


def _bos_id(vocab: Any, special: Mapping[str, str], *configs: Mapping[str, Any]) -> int | None:
    if "bos_token" in special:
        return vocab.token_id(special["bos_token"])
    for config in configs:
        i = config.get("bos_token_id")
        _check(i is None or type(i) is int, "bos_token_id", i, "an id")
        if i in vocab.ids_with_token:
            return i
    return vocab.prefix[0] if len(vocab.prefix) == 1 else None


def _eos_ids(vocab: Any, special: Mapping[str, str], *configs: Mapping[str, Any]) -> tuple[int, ...]:
    """The union, in order: the eos_token's id, then every eos_token_id (one or a list) that has a token."""
    found: list[Any] = [vocab.token_id(special["eos_token"])] if "eos_token" in special else [vocab.core_id("eos")]
    for config in configs:
        inner = config.get("text_config")
        value = config.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        _check(all(type(i) is int for i in ids), "eos_token_id", value, "an id or a list of ids")
        found += ids
    return tuple(dict.fromkeys(i for i in found if i in vocab.ids_with_token))


def _templates(files: Mapping[str, bytes], config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: chat_template.jinja wins over tokenizer_config.json, that over chat_template.json."""
    found: dict[str, str] = {}
    for value in (_json(files, "chat_template.json").get("chat_template"), config.get("chat_template")):
        single = [] if value is None else [{"name": "default", "template": value}]
        for entry in value if isinstance(value, list) else single:
            known = isinstance(entry, dict) and all(isinstance(entry.get(k), str) for k in ("name", "template"))
            _check(known, "chat_template", entry, "text, or a list of objects with name and template")
            found[entry["name"]] = entry["template"]
    for name, data in files.items():
        if name == "chat_template.jinja" or name.startswith(EXTRA_TEMPLATES + "/"):
            key = "default" if name == "chat_template.jinja" else Path(name).stem
            found[key] = data.decode("utf-8", "replace")
    return found
