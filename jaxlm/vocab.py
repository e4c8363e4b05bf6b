"""The two engines under `Tokenizer`: a tokenizer.json (tokenizers) and a tokenizer.model (sentencepiece).

Both answer the same questions: the ids of a text, the bytes of an id. Neither decodes text: bytes are joined and
decoded in one place (`Tokenizer.decode`), so that whole and streamed text cannot differ.

A marked text is a text in which `MARK` stands inside every string that looks like a control token but is not meant as
one. The mark keeps it from being parsed and is gone before the vocabulary sees the text.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxlm.errors import TokenizerError

MARK = "\ufdd0"  # a Unicode noncharacter: never part of interchanged text
SPACE = "\u2581"  # how SentencePiece vocabularies write a space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Added:
    """A token that is found in raw text before the vocabulary proper: `special` ones are control tokens."""

    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


def longest_first(strings: Collection[str]) -> re.Pattern[str]:
    """A pattern for any of the strings, longer ones first; matches nothing when there are none."""
    return re.compile("|".join(re.escape(s) for s in sorted(strings, key=lambda s: (-len(s), s)) if s) or "(?!)")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest is moved to 256 and up."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in kept]
    return {chr(b): b for b in kept} | {chr(256 + n): b for n, b in enumerate(moved)}


BYTE_OF_CHAR = _byte_alphabet()


class JsonVocab:
    """Engine of a tokenizer.json, run by the `tokenizers` library."""

    def __init__(self, data: bytes):
        self._data = data
        self._core = _load_json(data)
        self.added = {
            int(i): Added(t.content, t.special, t.lstrip, t.rstrip)
            for i, t in self._core.get_added_tokens_decoder().items()
        }
        self._decoder = _Decoder(_state(self._core.decoder))
        self.strip_space = self._decoder.strip
        self.prefix, self.suffix = _frame(_state(self._core.post_processor))
        self._marked: tuple[frozenset[str], Any] | None = None

    @cached_property
    def ids_with_token(self) -> frozenset[int]:
        return frozenset(self._core.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        return _ids(self._core, text)

    def encode_marked(self, text: str, guarded: frozenset[str]) -> list[int]:
        if self._marked is None or self._marked[0] != guarded:
            self._marked = (guarded, _load_json(_with_marks(self._data, guarded)))
        dropped = _ids(self._marked[1], text)
        kept = self.encode(text)
        # A vocabulary of whole words may find a control token again once the marks are gone: then the marks stay.
        control = {i for i, token in self.added.items() if token.text in guarded}
        return dropped if sum(i in control for i in dropped) == sum(i in control for i in kept) else kept

    def core_id(self, name: str) -> int | None:
        return None  # a tokenizer.json does not say which token is "bos" or "eos"

    def token_id(self, text: str) -> int | None:
        return self._core.token_to_id(text)

    def token_text(self, token: int) -> str | None:
        return self._core.id_to_token(token) if 0 <= token < 2**32 else None

    def token_bytes(self, token: int) -> bytes:
        if token in self.added:
            return self._decoder.added(self.added[token].text)
        return self._decoder.bytes_of(self.token_text(token) or "")


def _load_json(data: bytes) -> Any:
    import tokenizers

    with _refused("be read"):
        core = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    core.no_truncation()  # a file may carry its author's training settings
    core.no_padding()
    if getattr(core.model, "dropout", None) is not None:
        core.model.dropout = None
    return core


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """The library's errors, which are bare Exceptions or a panic that is not even that, as ours."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = " ".join(str(error).split())[:200].rstrip(".")
        raise TokenizerError(f"tokenizer.json cannot {what}: {text}.") from None


def _state(part: Any) -> dict[str, Any] | None:
    """A part of the pipeline as the file spells it."""
    return None if part is None else json.loads(part.__getstate__())


def _template_ids(step: dict[str, Any]) -> tuple[list[int], list[int]]:
    before: list[int] = []
    after: list[int] = []
    side = before
    for part in step["single"]:
        if "Sequence" in part:
            side = after
        elif (name := part["SpecialToken"]["id"]) in step["special_tokens"]:
            side += step["special_tokens"][name]["ids"]
        else:
            raise TokenizerError(f"tokenizer.json: the post-processor uses {name!r} without saying which token it is.")
    return before, after


def _ids(core: Any, text: str) -> list[int]:
    with _refused("encode the text"):  # for example a vocabulary of words without a token for unknown ones
        return core.encode(text, add_special_tokens=False).ids


def _frame(processor: dict[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that a post-processor puts before and after a text."""
    before: list[int] = []
    after: list[int] = []
    for step in [] if processor is None else processor.get("processors", [processor]):
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            before, after = [step["cls"][1], *before], [*after, step["sep"][1]]
        elif step["type"] == "TemplateProcessing":
            left, right = _template_ids(step)
            before, after = left + before, after + right
    return tuple(before), tuple(after)


def _with_marks(data: bytes, guarded: frozenset[str]) -> bytes:
    """The same tokenizer.json, made to drop marks after control tokens were found and before anything else."""
    doc = json.loads(data)
    drop = {"type": "Replace", "pattern": {"String": MARK}, "content": ""}
    own = [doc["normalizer"]] if doc.get("normalizer") else []
    doc["normalizer"] = {"type": "Sequence", "normalizers": [drop, *own]}
    for token in doc.get("added_tokens", []):
        if token["content"] in guarded:
            token["normalized"] = False  # else it would be looked for again once the marks are gone
    return json.dumps(doc).encode()


class _Decoder:
    """How one token becomes bytes, read from the decoder section of a tokenizer.json."""

    def __init__(self, spec: dict[str, Any] | None):
        parts = [] if spec is None else spec["decoders"] if spec["type"] == "Sequence" else [spec]
        kinds = [part["type"] for part in parts]
        known = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
        if unknown := set(kinds) - known:
            raise TokenizerError(f"tokenizer.json: decoder {sorted(unknown)[0]!r} is not one of {sorted(known)}.")
        self._byte_level = "ByteLevel" in kinds
        self._fallback = "ByteFallback" in kinds
        self._join = b"" if parts else b" "  # with no decoder at all, tokens are words
        self._replace = [_replacement(p) for p in parts if p["type"] in ("Replace", "Metaspace")]
        self.strip = not parts or any(_strips(part) for part in parts)

    def bytes_of(self, token: str) -> bytes:
        if self._byte_level:
            codes = [BYTE_OF_CHAR.get(c, -1) for c in token]
            return token.encode() if -1 in codes else bytes(codes)
        if self._fallback and (match := _BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replace:
            token = token.replace(old, new)
        return self._join + token.encode("utf-8", "replace")

    def added(self, text: str) -> bytes:
        """An added token stands for its own text, which is not written in the byte alphabet."""
        return text.encode("utf-8", "replace") if self._byte_level else self.bytes_of(text)


def _replacement(part: dict[str, Any]) -> tuple[str, str]:
    if part["type"] == "Metaspace":
        return part["replacement"], " "
    pattern = part["pattern"]
    if "String" not in pattern:
        raise TokenizerError(f"tokenizer.json: decoder Replace with pattern {pattern!r}; only a string is allowed.")
    return pattern["String"], part["content"]


def _strips(part: dict[str, Any]) -> bool:
    if part["type"] == "Strip":
        if (part["content"], part["start"], part["stop"]) not in ((" ", 1, 0), (" ", 0, 0)):
            raise TokenizerError(f"tokenizer.json: decoder Strip {part!r}; only one leading space is allowed.")
        return part["start"] == 1
    return part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never"
