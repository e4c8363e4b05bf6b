"""Where memory goes: the systems' peaks, the compiled programs' temporaries, and what grows with the context."""

import argparse
from typing import Any

from benchmarks.questions import Ratio, Result, Table
from benchmarks.turns import Bench

MB = 1e6


def memory(bench: Bench, args: argparse.Namespace) -> Result:
    """Every system's peak after an answer; of jaxlm's programs temporaries, aliases, constants; the cache by length."""
    limit = bench.jaxlm.facts["max_positions"]
    lengths = [n for n in args.lengths if n <= limit]
    bench.say("memory: jaxlm's programs are compiled")
    found = bench.jaxlm.ask("programs", batch=args.batch, prompt=args.prompt, lengths=lengths)
    tables = [peaks(bench, args), programs_table(found)]
    if lengths:
        tables.append(growth_table(found["by_length"]))
    decode = found["decode"]
    if not decode:
        bench.note("this backend does not report the memory of programs")
        return Result(tables)
    return Result(tables, {
        "decode temporaries / layer": Ratio(decode["temporary_bytes"] / found["layer_bytes"], "lower"),
        "aliased / cache": Ratio(decode["aliased_bytes"] / found["cache_bytes"]),
        "largest constant / layer": Ratio(decode["largest_constant_bytes"] / found["layer_bytes"], "lower"),
    })  # fmt: skip


def peaks(bench: Bench, args: argparse.Namespace) -> Table:
    """The most memory of each process, on an accelerator of the device, after a prompt and an answer."""
    rows = []
    for worker in bench.workers:
        bench.say(f"memory: {worker.name} answers")
        with bench.noting(worker):
            worker.ask("prefill", batch=args.batch, prompt=args.prompt)
            worker.ask("decode", batch=args.batch, length=args.prompt, steps=args.new)
            peak, weights = worker.ask("peak")["peak_bytes"] / MB, worker.facts["weight_bytes"] / MB
            columns = {"peak MB": peak, "weights MB": weights, "peak / weights": peak / weights}
            rows.append({"system": worker.name, **columns})
    return Table(f"peak memory of {args.batch} x ({args.prompt} + {args.new}) tokens", rows)


def programs_table(found: dict[str, Any]) -> Table:
    parts = {"prefill": found["prefill"], "decode": found["decode"]}
    rows = [{"system": name, **megabytes(stats)} for name, stats in parts.items() if stats]
    rows.append({"system": "largest layer", "weights MB": found["layer_bytes"] / MB})
    rows.append({"system": "cache", "weights MB": found["cache_bytes"] / MB})
    rows.append({"system": "all weights", "weights MB": found["weight_bytes"] / MB})
    return Table("jaxlm's programs beside what they work on", rows)


def growth_table(found: list[dict[str, Any]]) -> Table:
    rows = [
        {
            "system": "jaxlm",
            "x": one["length"],
            "cache MB": one["cache_bytes"] / MB,
            "decode temporaries MB": one["temporary_bytes"] / MB if "temporary_bytes" in one else None,
        }
        for one in found
    ]
    return Table("room for more tokens", rows, "tokens")


def megabytes(stats: dict[str, int]) -> dict[str, float]:
    names = {
        "temporaries MB": "temporary_bytes", "arguments MB": "argument_bytes", "aliased MB": "aliased_bytes",
        "largest constant MB": "largest_constant_bytes",
    }  # fmt: skip
    return {column: stats[name] / MB for column, name in names.items()}
