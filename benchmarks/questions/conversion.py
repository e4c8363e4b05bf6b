"""Converting a checkpoint: seconds, memory and rate on made-up weights, beside a copy of the files."""

import argparse
import shutil
import time
from pathlib import Path

from benchmarks import convert as tool
from benchmarks.questions import Ratio, Result, Table, spread
from benchmarks.turns import Bench


def convert(bench: Bench, args: argparse.Namespace) -> Result:
    """`jaxlm convert` in a process of its own, each turn beside copying the same files."""
    with tool.checkpoint(args.folder, args.gigabytes, 6) as (source, dest, facts):
        runs, copies = [], []
        for turn in range(bench.rounds):
            bench.say(f"convert: turn {turn + 1} of {bench.rounds}")
            shutil.rmtree(dest, ignore_errors=True)
            copies.append(copy_seconds(source, dest))
            shutil.rmtree(dest)
            runs.append(tool.run_child("convert", source, dest, 0))
        idle = tool.run_child("start", source, dest, 0)
    size, bound = facts["bytes"], 1.3 * facts["bytes"] + facts["largest_stack"]
    seconds, peaks = [run["seconds"] - idle["seconds"] for run in runs], [run["peak"] for run in runs]
    rows = [
        {"system": "jaxlm", "GB/s": spread([size / s / 1e9 for s in seconds]), "seconds": spread(seconds),
         "peak MB": spread([peak / 1e6 for peak in peaks])},
        {"system": "a copy", "GB/s": spread([size / s / 1e9 for s in copies]), "seconds": spread(copies)},
    ]  # fmt: skip
    title = f"convert {size / 1e6:.0f} MB of bfloat16; start-up ({idle['seconds']:.1f} s) left out"
    bench.note(f"memory bound: 1.3 x files + one stacked tensor = {bound / 1e6:.0f} MB")
    ratio = spread(seconds)["median"] / spread(copies)["median"]
    ratios = {"convert / copy": Ratio(ratio, "lower"), "convert peak / bound": Ratio(max(peaks) / bound, "lower")}
    return Result([Table(title, rows)], ratios)


def copy_seconds(source: Path, dest: Path) -> float:
    """Seconds to copy a folder, to the disk."""
    start = time.perf_counter()
    shutil.copytree(source, dest)
    tool.sync(dest)
    return time.perf_counter() - start
