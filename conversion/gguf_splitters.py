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
_CJK = r"[一-龥ࠀ-一가-퟿]+"
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = ("[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, _DIGIT)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, _DIGIT)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class Splitter:
    """patterns: as above. nfc: text is composed (NFC) first. whole_words: a word that is itself a token is that token,
    whatever the merges say. bos: a BOS is added where the file does not say."""

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


_BY_SPLITTER: tuple[tuple[str, Splitter], ...] = (
    ("default", Splitter(_DEFAULT)),
    ("gpt-2 phi-2 jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling", Splitter((_GPT2,))),
    ("olmo mpt", Splitter((_GPT2,), nfc=True)),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", Splitter((_DIGIT, _GPT2))),
    ("command-r", Splitter((_DIGIT, _GPT2), nfc=True)),
    ("falcon", Splitter(_FALCON)),
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
