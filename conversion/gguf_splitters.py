"""How byte-level BPE vocabularies cut text into words before merging, by the name in `tokenizer.ggml.pre`.

A GGUF file names its splitter and leaves the patterns to the reader. Those below are the ones of the models' published
tokenizer.json files, in the order in which they apply: each cuts every piece that the ones before it left.
"""

from dataclasses import dataclass

from jaxlm.errors import TokenizerError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_END}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_END}"
_QWEN35 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_SIGNS}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_CASED_SIGNS}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# Letters with case as DeepSeek LLM's tokenizer.json lists them (fewer than Unicode has), in hexadecimal.
_CASED_CODES = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1
3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A
1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC
1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134
2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""
_CASED_LETTERS = "".join("-".join(chr(int(code, 16)) for code in part.split("-")) for part in _CASED_CODES.split())
_PUNCTUATION = r"!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}"
_DEEPSEEK_LLM = ("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", rf"\s?[{_PUNCTUATION}]+", r"\s+$", _CJK, _DIGIT)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _KANA,
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2)
_FALCON_BYTES = (r"\p{N}+", r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class Splitter:
    """patterns: as above; byte_patterns: the same, applied once the text is written in the byte alphabet.
    nfc: text is composed (NFC) first. whole_words: a word that is itself a token is that token, whatever the merges
    say. bos: a BOS is added where the file does not say."""

    patterns: tuple[str, ...]
    byte_patterns: tuple[str, ...] = ()
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


_BY_SPLITTER: tuple[tuple[str, Splitter], ...] = (
    ("default", Splitter(_DEFAULT)),
    ("gpt-2 phi-2 jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling", Splitter((_GPT2,))),
    ("olmo mpt", Splitter((_GPT2,), nfc=True)),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", Splitter((_DIGIT, _GPT2))),
    ("command-r", Splitter((_DIGIT, _GPT2), nfc=True)),
    ("falcon", Splitter(_FALCON, _FALCON_BYTES)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        Splitter((_LLAMA3,), whole_words=True, bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", Splitter((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen megrez kormo", Splitter((_QWEN2,), nfc=True)),
    ("stablelm2 hunyuan solar-open grok-2", Splitter((_QWEN2,))),
    ("qwen35", Splitter((_QWEN35,), nfc=True)),
    ("tekken", Splitter((_TEKKEN,), whole_words=True, bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", Splitter((_GPT4O,))),
    ("deepseek-llm", Splitter(_DEEPSEEK_LLM)),
    ("deepseek-coder", Splitter(_DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense joyai-llm", Splitter(_DEEPSEEK_V3)),
    ("bailingmoe bailingmoe2 llada-moe", Splitter((_BAILING,))),
    ("seed-coder", Splitter((_SEED,))),
)
SPLITTERS: dict[str, Splitter] = {name: splitter for names, splitter in _BY_SPLITTER for name in names.split()}


def splitter(name: str) -> Splitter:
    """The splitter that `tokenizer.ggml.pre` names. Raises TokenizerError on one that is not known for certain."""
    if name not in SPLITTERS:
        raise TokenizerError(f"tokenizer.ggml.pre {name!r} is not known; known are {', '.join(sorted(SPLITTERS))}.")
    return SPLITTERS[name]
