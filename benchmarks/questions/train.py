"""A plain training step: next-token cross-entropy, its gradient and AdamW, beside the same step in torch."""

import argparse

from benchmarks.questions import Ratio, Result, Table, beside_peers, compute_rows, median, rates
from benchmarks.turns import Bench


def train(bench: Bench, args: argparse.Namespace) -> Result:
    """Tokens per second and MFU. The model's FLOPs are three times those of its forward pass (PaLM, appendix B)."""
    work = args.batch * args.prompt
    found = rates(bench.turns("train", "train", batch=args.batch, length=args.prompt), work)
    flops = bench.jaxlm.ask("prompt_costs", batch=args.batch, lengths=[args.prompt])[0]["train"]
    rows = compute_rows(bench, found, "train tok/s", work, flops)
    peaks = {worker.name: worker.ask("peak")["peak_bytes"] / 1e6 for worker in bench.workers}
    rows = [row | {"peak MB": peaks.get(row["system"])} for row in rows]
    title = f"training step of {args.batch} x {args.prompt} tokens, {flops / 1e9:.1f} GFLOP"
    ratios = {"train MFU": Ratio(median(rows[0]["MFU"]))} | beside_peers(found, "train")
    return Result([Table(title, rows)], ratios)
