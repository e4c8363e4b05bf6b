"""python -m benchmarks QUESTION: how fast, in one run, beside peers and beside the machine's own limit."""

import argparse
import importlib.util
import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import baseline, plot, report
from benchmarks.questions import Result, conversion, curves, memory, speculate, speed, starts, train
from benchmarks.systems import PEERS, SYSTEMS, Settings
from benchmarks.turns import Bench, BenchError
from jaxlm.quant import KINDS

QUESTIONS: dict[str, Callable[[Bench, argparse.Namespace], Result]] = {
    "speed": speed.speed,
    "decode": speed.decode,
    "prefill": speed.prefill,
    "load": starts.load,
    "convert": conversion.convert,
    "compile": starts.compile_,
    "batch": curves.batch,
    "context": curves.context,
    "memory": memory.memory,
    "train": train.train,
    "speculate": speculate.speculate,
}
MODELS = {"context": "random:llama-135m", "convert": "random:tiny"}  # A longer context; no model at all.
BATCHES, LENGTHS = [1, 2, 4, 8, 16, 32, 64], [64, 256, 1024, 4096, 16384, 32768]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    made.add_argument("question", choices=QUESTIONS, help="what to measure")
    made.add_argument("--model", help="a checkpoint, a known name or random:SHAPE; default smollm2-135m-instruct")
    made.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    made.add_argument("--quantize", choices=(*KINDS, "file"), help="weights of jaxlm; peers stay as they are")
    made.add_argument("--peer", action="append", default=[], choices=PEERS, help="repeatable")
    made.add_argument("--rounds", type=positive, default=3, help="turns that each system gets; default %(default)s")
    made.add_argument("--prompt", type=positive, default=512, help="tokens; default %(default)s")
    made.add_argument("--new", type=positive, default=64, help="new tokens; default %(default)s")
    made.add_argument("--batch", type=positive, default=1, help="rows; default %(default)s")
    made.add_argument("--batches", type=positive, nargs="+", default=BATCHES, help="of the question batch")
    made.add_argument("--lengths", type=positive, nargs="+", default=LENGTHS, help="of the question context")
    made.add_argument("--longest-prompt", type=positive, default=1024, help="prefilled by context; default %(default)s")
    made.add_argument("--draft", default="lookup", help="of the question speculate; default %(default)s")
    made.add_argument("--gigabytes", type=size, default=0.6, help="of the question convert; default %(default)s")
    made.add_argument("--folder", type=Path, help="of the question convert: where to make a temporary folder")
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw them into a PNG, SVG or PDF")
    made.add_argument("--check", type=Path, metavar="BASELINE", help="compare ratios with this file; exit 1 if worse")
    made.add_argument("--store", type=Path, metavar="BASELINE", help="put this run's ratios, less a margin, there")
    return made


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def size(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def check_arguments(args: argparse.Namespace) -> dict[str, dict[str, float]] | None:
    """What can be wrong is found before anything is timed; -> the bounds to check against."""
    for peer in args.peer:
        module = SYSTEMS[peer][1]
        if importlib.util.find_spec(module) is None:
            raise BenchError(f"{peer} is not installed (no module {module})")
    if args.plot:
        plot.check(args.plot)
    for path in (args.json, args.plot, args.store):
        if path and not path.absolute().parent.is_dir():
            raise BenchError(f"{path.parent} is no folder")
    if not args.check:
        return None
    return baseline.select(baseline.read(args.check), run_key(args), args.check)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {k: v for k, v in vars(args).items() if k not in ("json", "plot", "check", "store", "folder")}


def run_key(args: argparse.Namespace) -> str:
    return baseline.key_of({"question": args.question, "settings": settings_of(args)})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Open the systems, ask the question, end the systems."""
    longest = max(args.lengths) if args.question == "context" else args.prompt
    settings = Settings(args.model, args.dtype, args.quantize, longest + args.new)
    bench = Bench(args.question, settings, args.peer, args.rounds)
    try:
        bench.open()
        result = QUESTIONS[args.question](bench, args)
        return report.summary(bench, result, settings_of(args), bench.jaxlm.ask("machine"))
    finally:
        bench.close()


def run(args: argparse.Namespace) -> int:
    bounds = check_arguments(args)
    found = measure(args)
    print("\n".join(report.lines(found)))
    good = True
    for holds, line in baseline.verdicts(bounds, found["ratios"]) if bounds is not None else ():
        good &= holds
        print(line)
    print(json.dumps(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.plot:
        plot.draw(found, args.plot)
    if args.store:
        baseline.store(args.store, run_key(args), found["ratios"])
    return 0 if good else 1


def terminated(*_: Any) -> None:
    raise SystemExit(143)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, 1 where a ratio is worse than the baseline, 2 for what cannot be measured, 130 for Ctrl-C."""
    args = parser().parse_args(argv)
    args.model = args.model or MODELS.get(args.question, "smollm2-135m-instruct")
    try:
        return run(args)
    except BenchError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminated)
    sys.exit(main())
