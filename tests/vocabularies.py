"""Small vocabularies made in memory: byte-level BPE and SentencePiece, each as tokenizer files and as GGUF metadata."""

import functools
import io
import json

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It wasn't 12345 or 3 456; x != y , he said .",
    "def add(a, b):\n    return a + b\n\nfor i in range(100):\n\tprint(i)\n",
    "你好，世界。今天天气很好。 안녕하세요 세계 Привет, мир! Ünïcödé naïve café",
    "hello hello hello world world there there is is a a the the of of <0x0A> 🙂🙂 émoji",
]
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["<think>", "</think>"]  # added tokens that are not control tokens
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def byte_level_json() -> bytes:
    """A byte-level BPE tokenizer.json with GPT-2's splitter, its merges learned here."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_tokens(WORDS)
    return core.to_str().encode()


def byte_level_files(bos: bool = False, **config) -> dict[str, bytes]:
    document = json.loads(byte_level_json())
    if bos:
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        }
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML} | config
    return {"tokenizer.json": json.dumps(document).encode(), "tokenizer_config.json": json.dumps(config).encode()}


def byte_level_metadata(pre: str = "gpt-2", **extra) -> dict[str, object]:
    """The same vocabulary as GGUF metadata."""
    document = json.loads(byte_level_json())
    vocab = document["model"]["vocab"] | {t["content"]: t["id"] for t in document["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    types = [3 if t in CONTROL else 4 if t in WORDS else 1 for t in tokens]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(m) for m in document["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }
    return metadata | extra


@functools.cache
def sentencepiece_model(dummy_prefix: bool = True) -> bytes:
    """A SentencePiece BPE tokenizer.model with byte fallback and two user-defined pieces."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=out,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix,
        control_symbols=["<|im_start|>", "<|im_end|>"],
        user_defined_symbols=["<turn>", "\u2581\u2581\u2581"],
        allow_whitespace_only_pieces=True,
        split_digits=True,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    return out.getvalue()


def sentencepiece_files(dummy_prefix: bool = True, **config) -> dict[str, bytes]:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHATML} | config
    model = sentencepiece_model(dummy_prefix)
    return {"tokenizer.model": model, "tokenizer_config.json": json.dumps(config).encode()}


def sentencepiece_metadata(dummy_prefix: bool = True, **extra) -> dict[str, object]:
    """The same vocabulary as GGUF metadata; user-defined runs of spaces are spelled as spaces there."""
    import sentencepiece

    core = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(dummy_prefix))
    size = core.vocab_size()
    tokens = [core.id_to_piece(i) for i in range(size)]
    user = {"<turn>", "\u2581\u2581\u2581"}

    def kind(i: int) -> int:
        if core.is_unknown(i):
            return 2
        return 3 if core.is_control(i) else 6 if core.is_byte(i) else 4 if tokens[i] in user else 1

    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [t.replace("\u2581", " ") if t in user else t for t in tokens],
        "tokenizer.ggml.scores": [core.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": dummy_prefix,
        "tokenizer.chat_template": CHATML,
    }
    return metadata | extra
