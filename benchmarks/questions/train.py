"""A plain training step: next-token cross-entropy, its gradient and AdamW, beside the same step in torch."""

import argparse

from benchmarks.questions import Ratio, Result, Table, beside_peers, rates, scaled, spread
from benchmarks.turns import Bench


def train(bench: Bench, args: argparse.Namespace) -> Result:
    """Tokens per second and MFU. The model's FLOPs are three times those of its forward pass (PaLM, appendix B)."""
    answers = bench.turns("train", "train", batch=args.batch, length=args.prompt)
    flops = bench.jaxlm.ask("prompt_costs", batch=args.batch, lengths=[args.prompt])[0]["train"]
    work, peak = args.batch * args.prompt, bench.ceiling("matmul_rate")
    found = rates(answers, work)
    rows = [
        {"system": name, "train tok/s": spread(values), "MFU": scaled(values, flops / work / peak),
         "step s": spread([work / value for value in values]), "peak MB": peak_of(bench, name)}
        for name, values in found.items()
    ]  # fmt: skip
    rows.append({"system": "limit", "train tok/s": work * peak / flops, "MFU": 1.0, "step s": flops / peak})
    share = spread(found["jaxlm"])["median"] * flops / work / peak
    title = f"training step of {args.batch} x {args.prompt} tokens, {flops / 1e9:.1f} GFLOP"
    return Result([Table(title, rows)], {"train MFU": Ratio(share)} | beside_peers(found, "train"))


def peak_of(bench: Bench, name: str) -> float:
    worker = next(w for w in bench.workers if w.name == name)
    return worker.ask("peak")["peak_bytes"] / 1e6
