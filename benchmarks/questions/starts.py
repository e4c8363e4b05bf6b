"""What happens once: loading a model, compiling it, and a start that finds its programs compiled."""

import argparse
import os
import tempfile
from typing import Any

from benchmarks import shapes
from benchmarks.questions import Ratio, Result, Table, beside_peers, spread
from benchmarks.turns import Bench, BenchError, Unmeasured

CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


def load(bench: Bench, args: argparse.Namespace) -> Result:
    """Seconds from a checkpoint to weights in memory, in a new process each turn, beside reading the files' bytes."""
    if args.model.startswith(shapes.PREFIX):
        raise BenchError(f"load needs a checkpoint; {args.model} has no file")
    names = [worker.name for worker in bench.workers]
    facts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(bench.rounds):
        for name in names:
            bench.say(f"load: turn {turn + 1} of {bench.rounds}, {name}")
            with bench.fresh(name) as worker:
                facts[name].append(worker.facts | worker.ask("peak"))
    rows = [
        {
            "system": name,
            "load s": spread([f["load_seconds"] for f in found]),
            "imports s": spread([f["import_seconds"] for f in found]),
            "peak MB": spread([f["peak_bytes"] / 1e6 for f in found]),
            "weights MB": found[0]["weight_bytes"] / 1e6,
        }
        for name, found in facts.items()
    ]
    seconds = facts["jaxlm"][0]["weight_bytes"] / bench.ceiling("read_bandwidth")
    rows.append({"system": "limit", "load s": seconds})
    times = {name: [f["load_seconds"] for f in found] for name, found in facts.items()}
    return Result([Table("load; the limit reads the loaded weights once", rows)], beside_peers(times, "load", "lower"))


def compile_(bench: Bench, args: argparse.Namespace) -> Result:
    """Compile seconds by program, and the time to the first token of a start with nothing compiled and of one that
    finds its programs in JAX's persistent cache, over bare load + prefill of that same process."""
    starts: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="jaxlm-compiled-") as folder:
        for turn in range(bench.rounds):
            kept = CACHE | {"JAX_COMPILATION_CACHE_DIR": os.path.join(folder, str(turn))}
            starts.setdefault("jaxlm cold", []).append(start(bench, "jaxlm", args.prompt, kept))
            starts.setdefault("jaxlm warm", []).append(start(bench, "jaxlm", args.prompt, kept))
            for worker in bench.workers[1:]:
                try:
                    starts.setdefault(worker.name, []).append(start(bench, worker.name, args.prompt, {}))
                except Unmeasured as reason:
                    bench.note(str(reason))
    rows = [start_row(name, found) for name, found in starts.items()]
    warm = next(row for row in rows if row["system"] == "jaxlm warm")["/ (load + prefill)"]["median"]
    first = {name.removesuffix(" warm"): [f["load"] + f["cold"] for f in found] for name, found in starts.items()}
    del first["jaxlm cold"]
    ratios = {"warm start / (load + prefill)": Ratio(warm, "lower")} | beside_peers(first, "first token", "lower")
    tables = [Table(f"from load to the first token after {args.prompt}", rows), programs_table(starts["jaxlm cold"])]
    return Result(tables, ratios)


def start(bench: Bench, name: str, prompt: int, env: dict[str, str]) -> dict[str, Any]:
    """One new process: seconds to load, to the first token, and to the first token again."""
    bench.say(f"compile: {name} starts")
    with bench.fresh(name, env) as worker:
        return worker.ask("first_token", prompt=prompt) | {
            "load": worker.facts["load_seconds"], "imports": worker.facts["import_seconds"]
        }  # fmt: skip


def start_row(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "system": name,
        "load + first token s": spread([f["load"] + f["cold"] for f in found]),
        "/ (load + prefill)": spread([(f["load"] + f["cold"]) / (f["load"] + f["warm"]) for f in found]),
        "load s": spread([f["load"] for f in found]),
        "prefill s": spread([f["warm"] for f in found]),
        "imports s": spread([f["imports"] for f in found]),
    }


def programs_table(found: list[dict[str, Any]]) -> Table:
    """Seconds of each program's compilation, those of a name together."""
    totals: dict[str, list[float]] = {}
    for turn in found:
        sums: dict[str, float] = {}
        for program in turn["programs"]:
            sums[program["name"]] = sums.get(program["name"], 0.0) + program["seconds"]
        for name, seconds in sums.items():
            totals.setdefault(name, []).append(seconds)
    rows: list[dict[str, Any]] = [{"system": name, "compile s": spread(values)} for name, values in totals.items()]
    rows.sort(key=lambda row: -row["compile s"]["median"])
    few = [{"system": "the others", "compile s": sum(row["compile s"]["median"] for row in rows[8:])}]
    return Table("programs compiled by a cold start", rows[:8] + (few if len(rows) > 8 else []))
