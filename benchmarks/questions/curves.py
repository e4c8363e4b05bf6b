"""How time grows: with the number of rows (batch), and with what they hold (context)."""

import argparse
from typing import Any

import numpy as np

from benchmarks.questions import (
    Ratio,
    Result,
    Table,
    beside_peers,
    compute_rows,
    least_seconds,
    median,
    rates,
    scaled,
    spread,
    step_bytes,
)
from benchmarks.turns import Answers, Bench


def batch(bench: Bench, args: argparse.Namespace) -> Result:
    """Decode tokens per second of 1 to 64 rows, beside what reading and computing allow."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    over: dict[int, float] = {}
    for size in args.batches:
        answers = bench.turns(f"batch {size}", "decode", batch=size, length=args.prompt, steps=args.new)
        cost = bench.jaxlm.ask("step_costs", batch=size, lengths=[args.prompt + args.new // 2])[0]
        least = least_seconds(bench, cost["own"], cost["flops"])
        found = rates(answers, size * args.new)
        rows += curve_rows(bench, size, found, size, cost, least)
        over[size] = size / least / spread(found["jaxlm"])["median"]
        ratios |= beside_peers(found, f"decode of {size}")
    ratios["batch measured / arithmetic"] = Ratio(max(over.values()), "lower")
    return Result([Table(f"decode after {args.prompt} tokens", rows, "batch")], ratios)


def curve_rows(
    bench: Bench, x: int, found: dict[str, list[float]], size: int, cost: dict[str, float], least: float
) -> list[dict[str, Any]]:
    """The systems' rows at one point of a curve of decode tokens/s, and the limit's."""
    rows: list[dict[str, Any]] = []
    for name, values in found.items():
        share = step_bytes(bench, name, cost) / size / bench.ceiling("read_bandwidth")
        rows.append({
            "system": name, "x": x, "decode tok/s": spread(values),
            "ms/step": spread([1e3 * size / value for value in values]), "MBU": scaled(values, share),
            "measured / limit": spread([size / least / value for value in values]) if name == "jaxlm" else None,
        })  # fmt: skip
    return [*rows, {"system": "limit", "x": x, "decode tok/s": size / least, "ms/step": 1e3 * least}]


def context(bench: Bench, args: argparse.Namespace) -> Result:
    """Decode time at 64 to 32k tokens of context, fitted as a + b x length, and prefill time against length."""
    limit = bench.jaxlm.facts["max_positions"]
    lengths = [n for n in args.lengths if n + args.new <= limit]
    if len(lengths) < len(args.lengths):
        bench.note(f"the model's context of {limit} leaves out the lengths beyond")
    decoded = {
        n: bench.turns(f"context {n}", "decode", batch=args.batch, length=n, steps=args.new) for n in lengths
    }
    prompts = [n for n in lengths if n <= args.longest_prompt]
    prefilled = {n: bench.turns(f"prompt {n}", "prefill", batch=args.batch, prompt=n) for n in prompts}
    found = decode_curve(bench, args, decoded)
    if prefilled:
        second = prefill_curve(bench, args, prefilled)
        found.tables += second.tables
        found.ratios |= second.ratios
    return found


def decode_curve(bench: Bench, args: argparse.Namespace, decoded: dict[int, Answers]) -> Result:
    """ms per step at each length beside the arithmetic, and the straight lines through them."""
    middles = [n + args.new // 2 for n in decoded]
    prices = bench.jaxlm.ask("step_costs", batch=args.batch, lengths=middles)
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    least: list[float] = []
    ours: list[float] = []
    for (n, answers), cost in zip(decoded.items(), prices, strict=True):
        least.append(least_seconds(bench, cost["own"], cost["flops"]))
        found = rates(answers, args.batch * args.new)
        ours.append(args.batch / spread(found["jaxlm"])["median"])
        rows += curve_rows(bench, n, found, args.batch, cost, least[-1])
        ratios |= beside_peers(found, f"decode at {n}")
    measured, arithmetic = fit(middles, ours), fit(middles, least)
    lines = [
        {"system": name, "us per 1000 tokens": 1e9 * slope, "ms at 0": 1e3 * start}
        for name, (start, slope) in (("jaxlm", measured), ("limit", arithmetic))
    ]
    ratios["context measured / arithmetic"] = Ratio(max(o / x for o, x in zip(ours, least, strict=True)), "lower")
    if arithmetic[1] * max(middles) > 0.1 * arithmetic[0] and len(middles) > 1:
        ratios["context growth / arithmetic"] = Ratio(measured[1] / arithmetic[1], "lower")
    title = f"decode of {args.batch} by tokens in the cache"
    return Result([Table(title, rows, "context"), Table("step = ms at 0 + slope x context", lines)], ratios)


def prefill_curve(bench: Bench, args: argparse.Namespace, prefilled: dict[int, Answers]) -> Result:
    """Prefill tokens/s and MFU at each length."""
    prices = bench.jaxlm.ask("prompt_costs", batch=args.batch, lengths=list(prefilled))
    rows: list[dict[str, Any]] = []
    ratios: dict[str, Ratio] = {}
    shares: list[float] = []
    for (n, answers), price in zip(prefilled.items(), prices, strict=True):
        found = rates(answers, args.batch * n)
        made = compute_rows(bench, found, "prefill tok/s", args.batch * n, price["prefill"], x=n)
        shares.append(median(made[0]["MFU"]))
        rows += made
        ratios |= beside_peers(found, f"prefill of {n}")
    ratios["prefill MFU, longest"] = Ratio(shares[-1])
    return Result([Table(f"prefill of {args.batch} by length", rows, "tokens")], ratios)


def fit(x: list[int], y: list[float]) -> tuple[float, float]:
    """(a, b) of the straight line a + b x of least squares, each point weighted by 1/y: by relative error."""
    if len(x) < 2:
        return y[0], 0.0
    slope, start = np.polyfit(x, y, 1, w=1 / np.asarray(y))
    return float(start), float(slope)
