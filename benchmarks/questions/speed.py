"""prefill, decode, and both in one run (speed)."""

import argparse
from typing import Any

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
from benchmarks.turns import Bench


def prefill(bench: Bench, args: argparse.Namespace) -> Result:
    """Tokens per second of a whole prompt, and the share of the matrix-product rate (MFU)."""
    work = args.batch * args.prompt
    found = rates(bench.turns("prefill", "prefill", batch=args.batch, prompt=args.prompt), work)
    flops = bench.jaxlm.ask("prompt_costs", batch=args.batch, lengths=[args.prompt])[0]["prefill"]
    rows = compute_rows(bench, found, "prefill tok/s", work, flops)
    title = f"prefill: {args.batch} x {args.prompt} tokens, {flops / 1e9:.1f} GFLOP"
    ratios = {"prefill MFU": Ratio(median(rows[0]["MFU"]))} | beside_peers(found, "prefill")
    return Result([Table(title, rows)], ratios)


def decode(bench: Bench, args: argparse.Namespace) -> Result:
    """Tokens per second after the first, and the share of the read bandwidth (MBU)."""
    answers = bench.turns("decode", "decode", batch=args.batch, length=args.prompt, steps=args.new)
    found = rates(answers, args.batch * args.new)
    cost = bench.jaxlm.ask("step_costs", batch=args.batch, lengths=[args.prompt + args.new // 2])[0]
    bandwidth = bench.ceiling("read_bandwidth")
    rows: list[dict[str, Any]] = []
    for name, values in found.items():
        nbytes = step_bytes(bench, name, cost)
        rows.append({
            "system": name, "decode tok/s": spread(values), "MBU": scaled(values, nbytes / args.batch / bandwidth),
            "ms/step": spread([1e3 * args.batch / value for value in values]), "step MB": nbytes / 1e6,
        })  # fmt: skip
    least = least_seconds(bench, cost["own"], cost["flops"])
    rows.append({
        "system": "limit", "decode tok/s": args.batch / least, "MBU": cost["own"] / least / bandwidth,
        "ms/step": 1e3 * least, "step MB": cost["own"] / 1e6,
    })  # fmt: skip
    title = f"decode: {args.new} steps of {args.batch} after {args.prompt} tokens"
    ratios = {"decode MBU": Ratio(median(rows[0]["MBU"]))} | beside_peers(found, "decode")
    return Result([Table(title, rows)], ratios)


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
