"""prefill, decode, and both in one run (speed)."""

import argparse
from typing import Any

from benchmarks.questions import Ratio, Result, Table, beside_peers, least_seconds, rates, scaled, spread, step_bytes
from benchmarks.turns import Answers, Bench


def prefill(bench: Bench, args: argparse.Namespace) -> Result:
    """Tokens per second of a whole prompt, and the share of the matrix-product rate (MFU)."""
    return prefill_result(bench, args, bench.turns("prefill", "prefill", batch=args.batch, prompt=args.prompt))


def decode(bench: Bench, args: argparse.Namespace) -> Result:
    """Tokens per second after the first, and the share of the read bandwidth (MBU)."""
    answers = bench.turns("decode", "decode", batch=args.batch, length=args.prompt, steps=args.new)
    return decode_result(bench, args, answers)


def speed(bench: Bench, args: argparse.Namespace) -> Result:
    """Prefill, decode, load and memory."""
    parts = [prefill(bench, args), decode(bench, args)]
    rows = [
        {
            "system": worker.name,
            "load s": worker.facts["load_seconds"],
            "peak MB": worker.ask("peak")["peak_bytes"] / 1e6,
            "weights MB": worker.facts["weight_bytes"] / 1e6,
        }
        for worker in bench.workers
    ]
    tables = [table for part in parts for table in part.tables]
    return Result([*tables, Table("load and memory", rows)], parts[0].ratios | parts[1].ratios)


def prefill_result(bench: Bench, args: argparse.Namespace, answers: Answers) -> Result:
    flops = bench.jaxlm.ask("prompt_costs", batch=args.batch, lengths=[args.prompt])[0]["prefill"]
    work, peak = args.batch * args.prompt, bench.ceiling("matmul_rate")
    found = rates(answers, work)
    rows: list[dict[str, Any]] = [
        {"system": name, "prefill tok/s": spread(values), "MFU": scaled(values, flops / work / peak),
         "first token s": spread([work / value for value in values])}
        for name, values in found.items()
    ]  # fmt: skip
    rows.append({"system": "limit", "prefill tok/s": work * peak / flops, "MFU": 1.0, "first token s": flops / peak})
    share = spread(found["jaxlm"])["median"] * flops / work / peak
    title = f"prefill: {args.batch} x {args.prompt} tokens, {flops / 1e9:.1f} GFLOP"
    return Result([Table(title, rows)], {"prefill MFU": Ratio(share)} | beside_peers(found, "prefill"))


def decode_result(bench: Bench, args: argparse.Namespace, answers: Answers) -> Result:
    middle = args.prompt + args.new // 2
    cost = bench.jaxlm.ask("step_costs", batch=args.batch, lengths=[middle])[0]
    found = rates(answers, args.batch * args.new)
    bandwidth = bench.ceiling("read_bandwidth")
    rows: list[dict[str, Any]] = []
    share: dict[str, dict[str, float]] = {}
    for name, values in found.items():
        per_token = step_bytes(bench, name, cost) / args.batch
        share[name] = scaled(values, per_token / bandwidth)
        rows.append({
            "system": name, "decode tok/s": spread(values), "MBU": share[name],
            "ms/step": spread([1e3 * args.batch / value for value in values]), "step MB": per_token * args.batch / 1e6,
        })  # fmt: skip
    least = least_seconds(bench, cost["own"], cost["flops"])
    rows.append({
        "system": "limit", "decode tok/s": args.batch / least, "MBU": cost["own"] / least / bandwidth,
        "ms/step": 1e3 * least, "step MB": cost["own"] / 1e6,
    })  # fmt: skip
    title = f"decode: {args.new} steps of {args.batch} after {args.prompt} tokens"
    ratios = {"decode MBU": Ratio(share["jaxlm"]["median"])} | beside_peers(found, "decode")
    return Result([Table(title, rows)], ratios)
