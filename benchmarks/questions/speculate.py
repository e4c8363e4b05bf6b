"""Guessing ahead: a greedy answer with guesses looked up in the prompt, beside the same answer without."""

import argparse
from typing import Any

from benchmarks.questions import Ratio, Result, Table, spread
from benchmarks.turns import Answers, Bench, BenchError, Unmeasured

TEXTS = {
    "repeats itself": "def area_of_square(side):\n    return side * side\n\n\ndef area_of_rectangle(side, other):\n"
    "    return side * other\n\n\n" * 6,
    "does not": "The old harbour was quiet when the last ferry came in, and nobody on the quay had expected the woman "
    "with the green umbrella to step off it first.",
}


def speculate(bench: Bench, args: argparse.Namespace) -> Result:
    """Tokens per second of both, how much guessing gains, and whether the ids are the same."""
    if not bench.jaxlm.ask("drafts"):
        raise BenchError("jaxlm.generate has no draft: nothing to compare")
    result = Result([Table(f"{args.new} greedy tokens after a text", [])])
    for name, text in TEXTS.items():
        ids = ids_of(bench, text)
        plain = bench.turns(f"{name}, plain", "speculate", ids=ids, new=args.new, draft=None)
        guessed = bench.turns(f"{name}, guessing", "speculate", ids=ids, new=args.new, draft=args.draft)
        result.tables[0].rows += rows_of(name, plain, guessed, args.new)
        same = guessed["jaxlm"][0]["tokens"] == plain["jaxlm"][0]["tokens"]
        result.ratios[f"guessing, text that {name}"] = Ratio(gain(plain["jaxlm"], guessed["jaxlm"]))
        result.ratios[f"same ids, text that {name}"] = Ratio(float(same))
    return result


def rows_of(text: str, plain: Answers, guessed: Answers, new: int) -> list[dict[str, Any]]:
    rows = []
    for system, found in guessed.items():
        for label, turns in (("plain", plain.get(system, [])), ("guessing", found)):
            if turns:
                rate = spread([new / turn["seconds"] for turn in turns])
                gained = gain(plain[system], found) if label == "guessing" else 1.0
                rows.append({"system": f"{system}, {label}: {text}", "tok/s": rate, "gain": gained})
    return rows


def gain(plain: list[dict[str, Any]], guessed: list[dict[str, Any]]) -> float:
    """How many times as fast."""
    before, after = (spread([turn["seconds"] for turn in turns])["median"] for turns in (plain, guessed))
    return before / after


def ids_of(bench: Bench, text: str) -> list[int]:
    """The text's ids, or where a model has no tokenizer its bytes."""
    try:
        return bench.jaxlm.ask("encode", text=text)["ids"]
    except Unmeasured:
        return [5 + byte for byte in text.encode()]
