"""The vocabulary inside a GGUF file, as the tokenizer files that a checkpoint folder would have.

    "gpt2"   byte-level BPE, merged by rank      -> tokenizer.json
    "llama"  SentencePiece BPE, merged by score  -> tokenizer.model
    any other `tokenizer.ggml.model` is refused by name

Key names and meanings: the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxlm.conversion.gguf_splitters import Splitter, splitter
from jaxlm.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types; SentencePiece numbers them alike
# Tokens that end a turn, though a GGUF file often names only one id as its end.
_TURN_ENDS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
_TURN_ENDS |= {"<|return|>", "<|call|>", "<|eot|>", "<｜end▁of▁sentence｜>", "[EOS]"}


def tokenizer_files(metadata: Mapping[str, object]) -> dict[str, bytes]:
    """Tokenizer files by name, for `Tokenizer.from_files`.

    metadata: GGUF key -> plain Python value. Raises TokenizerError naming the key and what is wrong with it.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerError("tokenizer.ggml.tokens is missing or empty: this GGUF file has no vocabulary.")
    if len(set(tokens)) != len(tokens):
        twice = next(t for n, t in enumerate(tokens) if t in tokens[:n])
        raise TokenizerError(f"tokenizer.ggml.tokens holds {twice!r} twice; tokens must be unique.")
    ids = {name: _id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in _ID_KEYS}
    types = _types(metadata, tokens, ids)
    if kind == "gpt2":
        return _byte_level(metadata, tokens, types, ids)
    if kind == "llama":
        return _sentencepiece(metadata, tokens, types, ids)
    raise TokenizerError(f"tokenizer.ggml.model {kind!r} is not supported; supported are 'gpt2' and 'llama'.")


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_ID_KEYS = ("bos", "eos", "eot", "eom", "unknown", "padding")


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    value = metadata.get(key, [])
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise TokenizerError(f"{key} must be a list of strings.")
    try:
        "".join(value).encode()
    except UnicodeEncodeError:
        raise TokenizerError(f"{key} holds text that is not valid UTF-8.") from None
    return list(value)


def _numbers(metadata: Mapping[str, object], key: str, size: int, kind: type) -> list[Any] | None:
    """One number per token, or None where the key is absent."""
    if key not in metadata:
        return None
    value: Any = metadata[key]
    value = value.tolist() if hasattr(value, "tolist") else value
    count = len(value) if isinstance(value, list) else 0
    if count != size or not all(type(v) in (int, kind) for v in value):
        raise TokenizerError(f"{key} has {count} entries; it needs one {kind.__name__} for each of {size} tokens.")
    return value


def _id(metadata: Mapping[str, object], key: str, size: int) -> int | None:
    value: Any = metadata.get(key)
    if value is None or value in (-1, 0xFFFFFFFF):  # ways of writing "none"
        return None
    if type(value) is not int or not 0 <= value < size:
        raise TokenizerError(f"{key} is {value!r}; the vocabulary has ids 0 to {size - 1}.")
    return value


def _flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{name}", default))


def _types(metadata: Mapping[str, object], tokens: list[str], ids: Mapping[str, int | None]) -> list[int]:
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), int)
    types = [NORMAL] * len(tokens) if types is None else list(types)
    if bad := set(types) - set(range(7)):
        raise TokenizerError(f"tokenizer.ggml.token_type holds {min(bad)}; token types are 1 to 6.")
    for name in ("bos", "eos", "eot", "eom"):  # some files leave their ends marked as ordinary text
        token = ids[name]
        if token is not None and types[token] in (0, NORMAL):
            types[token] = CONTROL
    return types


def _byte_level(
    metadata: Mapping[str, object], tokens: list[str], types: list[int], ids: Mapping[str, int | None]
) -> dict[str, bytes]:
    split = splitter(str(metadata.get("tokenizer.ggml.pre", "default")))
    added = [_added(i, t, types[i] == CONTROL) for i, t in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED)]
    merges = [_merge(m) for m in _strings(metadata, "tokenizer.ggml.merges")]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": split.whole_words,
        # Unused ids only fill the embedding up to a round number: no text has them and they must not be sampled.
        "vocab": {t: i for i, t in enumerate(tokens) if types[i] != UNUSED},
        "merges": merges,
    }
    bos = _flag(metadata, "add_bos_token", split.bos and ids["bos"] is not None)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if split.nfc else None,
        "pre_tokenizer": _pre_tokenizer(split),
        "post_processor": _frame(
            tokens, ids["bos"] if bos else None, ids["eos"] if _flag(metadata, "add_eos_token", False) else None
        ),
        "decoder": _BYTE_LEVEL,
        "model": model,
    }
    return {"tokenizer.json": _dump(document)} | _settings(metadata, tokens, types, ids, {})


def _merge(line: str) -> list[str]:
    left, space, right = line[:1] + line[1:].partition(" ")[0], *line[1:].partition(" ")[1:]
    if not (left and space and right):
        raise TokenizerError(f"tokenizer.ggml.merges holds {line!r}; a merge is two tokens with a space between them.")
    return [left, right]


def _added(token: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, "special": special, **flags}


def _pre_tokenizer(split: Splitter) -> dict[str, Any]:
    def cuts(patterns: tuple[str, ...]) -> list[dict[str, Any]]:
        return [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]

    steps = [*cuts(split.patterns), _BYTE_LEVEL, *cuts(split.byte_patterns)]
    return {"type": "Sequence", "pretokenizers": steps}


def _frame(tokens: list[str], bos: int | None, eos: int | None) -> dict[str, Any] | None:
    """The post-processor that puts BOS and EOS around a text."""
    used = [i for i in (bos, eos) if i is not None]
    if not used:
        return None

    def around(name: str, kind: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": kind}}
        ends = [[] if i is None else [{"SpecialToken": {"id": tokens[i], "type_id": kind}}] for i in (bos, eos)]
        return [*ends[0], text, *ends[1]]

    special = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in used}
    single = around("A", 0)
    return {"type": "TemplateProcessing", "single": single, "pair": single + around("B", 1), "special_tokens": special}


def _sentencepiece(
    metadata: Mapping[str, object], tokens: list[str], types: list[int], ids: Mapping[str, int | None]
) -> dict[str, bytes]:
    from sentencepiece import sentencepiece_model_pb2

    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens), float)
    if scores is None:
        raise TokenizerError("tokenizer.ggml.scores is missing; a 'llama' vocabulary is merged by score.")
    messages: Any = sentencepiece_model_pb2  # classes made at import time
    model = messages.ModelProto()
    types = _spm_types(tokens, types, ids, known="tokenizer.ggml.token_type" in metadata)
    for text, score, kind in zip(tokens, scores, types, strict=True):
        # A file spells user-defined runs of spaces as they are; SentencePiece looks for them with its own space.
        text = text.replace(" ", "\u2581") if kind == USER_DEFINED else text
        model.pieces.add(piece=text, score=float(score), type=kind)
    trainer = model.trainer_spec
    trainer.model_type = messages.TrainerSpec.BPE
    trainer.vocab_size = len(tokens)
    trainer.byte_fallback = BYTE in types
    for name, key in (("unk", "unknown"), ("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = types.index(UNKNOWN) if name == "unk" else ids[key]
        setattr(trainer, f"{name}_id", -1 if token is None else token)
        if token is not None:
            setattr(trainer, f"{name}_piece", tokens[token])
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = _flag(metadata, "add_space_prefix", True)
    normalizer.remove_extra_whitespaces = _flag(metadata, "remove_extra_whitespaces", False)
    normalizer.escape_whitespaces = True
    config = {
        "legacy": True,
        "add_bos_token": _flag(metadata, "add_bos_token", ids["bos"] is not None),
        "add_eos_token": _flag(metadata, "add_eos_token", False),
        "added_tokens_decoder": _phi3_tokens(metadata, tokens, types),
    }
    return {"tokenizer.model": model.SerializeToString()} | _settings(metadata, tokens, types, ids, config)


def _spm_types(tokens: list[str], types: list[int], ids: Mapping[str, int | None], known: bool) -> list[int]:
    """Types as SentencePiece needs them: one unknown piece; bytes known by their spelling if the file has no types."""
    types = [NORMAL if kind == 0 else kind for kind in types]
    if not known:
        types = [BYTE if _is_byte(text) else kind for text, kind in zip(tokens, types, strict=True)]
    unknown = ids["unknown"] if ids["unknown"] is not None else 0
    if UNKNOWN not in types:
        types[unknown] = UNKNOWN
    return types


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text[:3] == "<0x" and text[5] == ">"


def _phi3_tokens(metadata: Mapping[str, object], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Phi-3's turn marks swallow the white space after them, which a GGUF file has no field for."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return {}
    plain = ("<s>", "<unk>", "<|endoftext|>")
    marks = {i: t for i, t in enumerate(tokens) if types[i] == CONTROL and t not in plain}
    return {str(i): {"content": t, "special": True, "rstrip": True} for i, t in marks.items()}


def _settings(
    metadata: Mapping[str, object],
    tokens: list[str],
    types: list[int],
    ids: Mapping[str, int | None],
    config: dict[str, Any],
) -> dict[str, bytes]:
    """tokenizer_config.json and generation_config.json: special tokens, chat templates, every id that ends a text."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    special = {f"{names[key]}_token": tokens[i] for key, i in ids.items() if key in names and i is not None}
    templates = {key: v for key, v in metadata.items() if key.startswith("tokenizer.chat_template")}
    named = [
        {"name": key.removeprefix("tokenizer.chat_template").lstrip(".") or "default", "template": value}
        for key, value in templates.items()
        if isinstance(value, str)
    ]
    chosen: Any = named[0]["template"] if [n["name"] for n in named] == ["default"] else named
    config = config | special | ({"chat_template": chosen} if named else {})
    files = {"tokenizer_config.json": _dump(config)}
    ends = [i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None]
    ends += _turn_ends(tokens, types, " ".join(n["template"] for n in named))
    if ends:
        files["generation_config.json"] = _dump({"eos_token_id": list(dict.fromkeys(ends))})
    return files


def _turn_ends(tokens: list[str], types: list[int], template: str) -> list[int]:
    """Control tokens that are known to end a turn and that the file's own chat template writes."""
    ends = {t for t in _TURN_ENDS if t in template}
    if "<|return|>" in tokens and "<|call|>" in tokens:  # here <|end|> only ends a part of a turn
        ends = (ends - {"<|end|>"}) | {"<|return|>", "<|call|>"}
    return [i for i, t in enumerate(tokens) if t in ends and types[i] in (CONTROL, USER_DEFINED)]


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8")
