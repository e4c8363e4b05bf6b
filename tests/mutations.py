"""Damage to files, drawn from a seeded `random.Random`: bytes, JSON documents, GGUF files, SentencePiece models."""

import json
import random
import struct
from typing import Any

NUMBERS = (-1, 0, 1, 2, 3, 7, 255, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 39, 1 << 63, (1 << 64) - 1, 10**30, 10**400)
FLOATS = (0.5, -0.0, -1.5, 1e-320, 1e300, 3.0)
WORDS = (
    "", " ", "..", "../x", "../../../../etc/passwd", "/etc/passwd", "~/x", "a/../b", "a\0b", "\ud800", "\ufdd0",
    "x" * 70_000, "nan", "{i}{e}", "%s", "F32", "BF16", "I64", "float16", "llama", "silu", "<s>", "c.0.0",
    "model.safetensors", ".",
)  # fmt: skip
RAW = {
    "@nan@": "NaN", "@inf@": "-Infinity", "@big@": "1e999", "@digits@": "9" * 5000,
    "@deep@": "[" * 50_000 + "]" * 50_000,
    "@deeper@": '{"a":' * 20_000 + "1" + "}" * 20_000, "@list@": "[" + "1," * 50_000 + "1]", "@open@": "[" * 1000,
    "@half@": '"\\ud800"', "@words@": "[" + '"a",' * 5000 + '"b"]',
}  # fmt: skip
COUNTS = (
    0, 1, 0x7F, 0xFF, 0xFFFF, 1 << 20, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes, head: int = 2048) -> bytes:
    """One to three changes, more of them near the start, where headers are."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(max(1, min(head, len(out)) if rng.random() < 0.7 else len(out)))
        length = rng.choice((1, 2, 4, 8, 32, 300))
        other = rng.randrange(max(1, len(out)))
        match rng.randrange(9):
            case 0 | 1:
                out[at : at + 1] = bytes([(out[at] if at < len(out) else 0) ^ (1 << rng.randrange(8))])
            case 2:
                out[at : at + length] = rng.randbytes(length)
            case 3:
                del out[at:]
            case 4:
                out[at:at] = out[other : other + length]
            case 5:
                del out[at : at + length]
            case 6:
                size = rng.choice((4, 8))
                number = rng.choice((*COUNTS, len(data), len(data) - 8, len(data) + 1)) % (1 << 8 * size)
                out[at : at + size] = number.to_bytes(size, "little")
            case 7:
                out[at : at + length] = bytes(length)
            case 8:
                out += rng.randbytes(length)
    return bytes(out)


def mutate_json(rng: random.Random, text: bytes) -> bytes:
    """One or two changes to the document; now and then to the text itself as well."""
    document = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2))):
        document = _change(rng, document)
    out = json.dumps(document, ensure_ascii=rng.random() < 0.5)
    for name, raw in RAW.items():
        out = out.replace(f'"{name}"', raw)
    out = out.replace("@@twice", "")  # Now the name is there twice.
    data = out.encode("utf-8", "surrogatepass")
    return mutate_bytes(rng, data, len(data)) if rng.random() < 0.1 else data


def _change(rng: random.Random, node: Any, depth: int = 0) -> Any:
    """The node with one change somewhere in it."""
    children = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    if not children or (depth and rng.random() < 0.25):
        return _other(rng, node)
    key = rng.choice(children)
    out = dict(node) if isinstance(node, dict) else list(node)
    if rng.random() < (0.8 if isinstance(out, list) else 0.6):
        out[key] = _change(rng, out[key], depth + 1)
        return out
    if isinstance(out, list):
        return _change_list(rng, out, key)
    match rng.randrange(6):
        case 0:
            del out[key]
        case 1:
            out[f"{key}@@twice"] = rng.choice((out[key], _other(rng, out[key])))
        case 2:
            out[rng.choice((f"{key}x", rng.choice(WORDS), key[:-1]))] = out.pop(key)
        case 3:
            other = rng.choice(children)
            out[key], out[other] = out[other], out[key]
        case 4:
            out[rng.choice(("unknown", *WORDS))] = _other(rng, 1)
        case 5:
            out[key] = out[rng.choice(children)]
    return out


def _change_list(rng: random.Random, out: list[Any], key: int) -> list[Any]:
    match rng.randrange(4):
        case 0:
            del out[key]
        case 1:
            out.insert(key, out[key])
        case 2:
            out[key:] = []
        case 3:
            out[key] = _other(rng, out[key])
    return out


def _other(rng: random.Random, value: Any) -> Any:
    """Another value: a near one, or one of a wrong type, or one that is wrong for everything."""
    if rng.random() < 0.4:
        if isinstance(value, bool):
            return not value
        if isinstance(value, (int, float)):
            return rng.choice((value + 1, value - 1, value * 2, -value, value // 2))
        if isinstance(value, str) and value:
            at = rng.randrange(len(value))
            return value[:at] + rng.choice(("", "\0", "a", "\u2581", value)) + value[at + 1 :]
        if isinstance(value, list) and value:
            return value[::-1]
    pools = (NUMBERS, FLOATS, WORDS, tuple(RAW), (None, True, False, [], {}, [None], {"a": 1}), ([value], {"x": value}))
    return rng.choice(rng.choice(pools))


# GGUF: (key, value) pairs and (name, dims innermost first, type, offset) rows, written whatever they say.
_SCALAR = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}


def mutate_gguf(rng: random.Random, metadata: dict[str, Any], table: list[tuple[Any, ...]], data: bytes) -> bytes:
    """A whole file with one or two changes to its metadata or its table of tensors."""
    pairs, rows = list(metadata.items()), list(table)
    for _ in range(rng.choice((1, 1, 2))):
        if rng.random() < 0.6:
            at = rng.randrange(len(pairs))
            key, value = pairs[at]
            match rng.randrange(8):
                case 0:
                    del pairs[at]
                case 1:
                    pairs.insert(at, (key, _other(rng, value)))
                case 2:
                    pairs[at] = (rng.choice((key[:-1], *WORDS[:12])), value)
                case 3:
                    pairs[at] = (key, rng.choice(pairs)[1])
                case _:
                    pairs[at] = (key, _change(rng, value))
        else:
            at = rng.randrange(len(rows))
            rows[at] = _change_row(rng, rows[at], rng.choice(rows))
    return write_gguf(pairs, rows, data, rng)


def _change_row(rng: random.Random, row: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    name, dims, kind, offset = row
    match rng.randrange(6):
        case 0:
            return rng.choice((name + "x", *WORDS[:12], other[0])), dims, kind, offset
        case 1:
            return name, [rng.choice((d, d + 1, 2 * d, *COUNTS)) for d in dims], kind, offset
        case 2:
            return name, rng.choice((dims[::-1], dims[1:], [*dims, 1], [1, *dims], [1] * 9)), kind, offset
        case 3:
            return name, dims, rng.choice((*range(42), 255, 1 << 31)), offset
        case 4:
            return name, dims, kind, rng.choice((other[3], offset + 1, offset + 32, *COUNTS))
        case _:
            return other


def write_gguf(pairs: Any, rows: Any, data: bytes, rng: random.Random | None = None) -> bytes:
    """A GGUF file, version 3, alignment 32; with an `rng` its counts are sometimes wrong."""
    counts = [len(rows), len(pairs)]
    if rng and rng.random() < 0.1:
        counts[rng.randrange(2)] = rng.choice((*COUNTS, len(rows) + 1, len(rows) - 1)) % (1 << 64)
    out = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    for key, value in pairs:
        out += _string(key) + _value(value)
    for name, dims, kind, offset in rows:
        sizes = [d % (1 << 64) for d in dims]
        out += _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *sizes, kind % (1 << 32), offset % (1 << 64))
    return out + bytes(-len(out) % 32) + data


def _string(text: Any) -> bytes:
    data = str(text).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """The type's number and the value."""
    if isinstance(value, list):
        kind, _ = _typed(value[0]) if value and not isinstance(value[0], list) else (8, b"")
        code = next((c for c, number in _SCALAR.items() if number == kind), None)
        items = [_string(v) if code is None else struct.pack("<" + code, _fit(v, code)) for v in value]
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)
    kind, data = _typed(value)
    return struct.pack("<I", kind) + data


def _typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, (str, list, dict)) or value is None:
        return 8, _string(value)
    code = "?" if isinstance(value, bool) else "f" if isinstance(value, float) else "I" if 0 <= value < 1 << 32 else "q"
    return _SCALAR[code], struct.pack("<" + code, _fit(value, code))


def _fit(value: Any, code: str) -> Any:
    if code == "?":
        return bool(value)
    number = value if isinstance(value, (int, float)) else 0
    if code in "fd":
        return float(number) if abs(number) < 1e38 else float("inf")
    low, high = {"I": (0, (1 << 32) - 1), "q": (-(1 << 63), (1 << 63) - 1), "i": (-(1 << 31), (1 << 31) - 1)}[code]
    return min(max(int(number), low), high)


def mutate_sentencepiece(rng: random.Random, data: bytes) -> bytes:
    """A SentencePiece model with one to three changes to its pieces or settings."""
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    model = messages.ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        piece = rng.choice(model.pieces) if model.pieces else model.pieces.add(piece="a", score=0.0, type=1)
        match rng.randrange(10):
            case 0:
                other = rng.choice(model.pieces).piece
                piece.piece = rng.choice(("", "\0", "<0xGG>", "<0x4>", "<0xFFF>", "\u2581" * 500, other))
            case 1:
                piece.score = rng.choice((float("nan"), float("inf"), float("-inf"), 1e30, 0.0, -1.0))
            case 2 | 3:
                piece.type = rng.randrange(1, 7)
            case 4:
                del model.pieces[rng.randrange(len(model.pieces)) :]
            case 5:
                del model.pieces[rng.randrange(len(model.pieces))]
            case 6:
                name = rng.choice(("unk_id", "bos_id", "eos_id", "pad_id", "vocab_size", "max_sentencepiece_length"))
                setattr(model.trainer_spec, name, rng.choice((-1, 0, 1, 5, 10**6, (1 << 31) - 1, -(1 << 31))))
            case 7:
                model.trainer_spec.model_type = rng.randrange(1, 5)
                model.trainer_spec.byte_fallback = rng.random() < 0.5
                model.trainer_spec.treat_whitespace_as_suffix = rng.random() < 0.5
            case 8:
                spec = rng.choice((model.normalizer_spec, model.denormalizer_spec))
                charsmap = spec.precompiled_charsmap or rng.randbytes(rng.choice((1, 4, 40, 2000)))
                spec.precompiled_charsmap = mutate_bytes(rng, charsmap, 64)
            case 9:
                name = rng.choice(("normalizer_spec", "trainer_spec", "pieces"))
                model.ClearField(name)
    return model.SerializeToString()
