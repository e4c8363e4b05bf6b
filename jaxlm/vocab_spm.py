"""Engine of a tokenizer.model, run by the `sentencepiece` library. See `jaxlm.vocab` for what an engine answers."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jaxlm.errors import TokenizerError
from jaxlm.vocab import MARK, SPACE, Added, longest_first


class SpmVocab:
    """A SentencePiece model plus the tokens that tokenizer_config.json adds to it.

    SentencePiece never makes a control piece out of text, so control and added tokens are cut out of the text here and
    what lies between is encoded by the library. `legacy` (the default of such files): every stretch after a control
    token gets the leading space that the model adds at the start; otherwise only the first stretch does.
    """

    def __init__(self, data: bytes, config: Mapping[str, Any]):
        self._data = data
        self._core = _processor(data)
        self._legacy = config.get("legacy") is not False
        self.strip_space = self._core.normalize("a").startswith(SPACE)
        cut = self._control() | _config_tokens(config)
        self.added = self._user_defined() | cut
        self._by_text = {token.text: i for i, token in cut.items()}
        self._pattern = longest_first(self._by_text)
        self.prefix: tuple[int, ...] = ()
        self.suffix: tuple[int, ...] = ()

    def _user_defined(self) -> dict[int, Added]:
        """Pieces that the library itself finds whole."""
        pieces = enumerate(_proto(self._data).pieces)
        return {i: Added(piece.piece, special=False) for i, piece in pieces if piece.type == piece.USER_DEFINED}

    def _control(self) -> dict[int, Added]:
        core = self._core
        return {
            i: Added(core.id_to_piece(i), special=True)
            for i in range(core.vocab_size())
            if core.is_control(i) or core.is_unknown(i)
        }

    @cached_property
    def _bare(self) -> Any:
        """The same model without the leading space."""
        model = _proto(self._data)
        model.normalizer_spec.add_dummy_prefix = False
        return _processor(model.SerializeToString())

    @cached_property
    def ids_with_token(self) -> frozenset[int]:
        core = self._core
        return frozenset(i for i in range(core.vocab_size()) if not core.is_unused(i)) | frozenset(self.added)

    def encode(self, text: str) -> list[int]:
        return self._encode(text, marked=False)

    def encode_marked(self, text: str, guarded: frozenset[str]) -> list[int]:
        return self._encode(text, marked=True)

    def _encode(self, text: str, marked: bool) -> list[int]:
        ids: list[int] = []
        start, first = 0, True
        for match in [*self._pattern.finditer(text), None]:
            stretch = text[start : match.start() if match else len(text)]
            token = self.added[self._by_text[match[0]]] if match else None
            if token and token.lstrip:
                stretch = stretch.rstrip()
            ids += self._stretch(stretch.split(MARK) if marked else [stretch], prefix=first or self._legacy)
            if match and token:
                ids.append(self._by_text[match[0]])
                start, first = match.end(), False
                if token.rstrip:
                    start += len(text[start:]) - len(text[start:].lstrip())
        return ids

    def _stretch(self, parts: list[str], prefix: bool) -> list[int]:
        """Text between control tokens. Encoded apart at marks, where the library too must not find a piece whole."""
        ids = (self._core if prefix else self._bare).encode(parts[0]) if parts[0] else []
        return sum((self._bare.encode(part) for part in parts[1:]), ids)

    def core_id(self, name: str) -> int | None:
        token = {"bos": self._core.bos_id, "eos": self._core.eos_id}[name]()
        return token if token >= 0 else None

    def token_id(self, text: str) -> int | None:
        if text in self._by_text:
            return self._by_text[text]
        i = self._core.piece_to_id(text)
        return i if self._core.id_to_piece(i) == text else None

    def token_text(self, token: int) -> str | None:
        if token in self.added:
            return self.added[token].text
        return self._core.id_to_piece(token) if 0 <= token < self._core.vocab_size() else None

    def token_bytes(self, token: int) -> bytes:
        if token in self.added and self.added[token].text in self._by_text:
            return self.added[token].text.encode()
        text = self.token_text(token) or ""
        if text and self._core.is_byte(token):
            return bytes([int(text[3:5], 16)])
        return text.replace(SPACE, " ").encode()


def _processor(data: bytes) -> Any:
    import sentencepiece

    try:
        core = sentencepiece.SentencePieceProcessor(model_proto=data)
        core.id_to_piece(list(range(core.vocab_size())))  # Fails where a piece is not UTF-8.
        return core
    except Exception as error:
        raise TokenizerError(f"tokenizer.model is not a SentencePiece model: {' '.join(str(error).split())}.") from None


def _proto(data: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2  # classes made at import time
    return messages.ModelProto.FromString(data)


def _config_tokens(config: Mapping[str, Any]) -> dict[int, Added]:
    """The tokens of `added_tokens_decoder`: {"32000": {"content": "<|user|>", "special": true, ...}}."""
    out: dict[int, Added] = {}
    tokens = config.get("added_tokens_decoder") or {}
    if not isinstance(tokens, dict):
        raise TokenizerError(
            f"tokenizer_config.json: added_tokens_decoder is a {type(tokens).__name__}, not an object."
        )
    for key, token in tokens.items():
        if not (str(key).isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)):
            raise TokenizerError(
                f"tokenizer_config.json: added_tokens_decoder[{key!r}] is {token!r}; needs a number and a content."
            )
        flags = {name: token.get(name, False) for name in ("special", "lstrip", "rstrip")}
        if not all(isinstance(flag, bool) for flag in flags.values()):
            raise TokenizerError(
                f"tokenizer_config.json: added_tokens_decoder[{key!r}] has flags {flags}; allowed: true, false."
            )
        out[int(key)] = Added(token["content"], **flags)
    return out
