"""python -m benchmarks QUESTION: how fast, in one run, beside peers and beside the machine's own limit."""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine

PEERS = {"transformers": "transformers", "llama-cpp": "llama_cpp"}  # name -> module that must be installed


class Worker:
    """A system in its own process (benchmarks/worker.py)."""

    def __init__(self, name: str, args: argparse.Namespace):
        self.name = name
        command = [sys.executable, "-m", "benchmarks.worker", name, args.model, args.dtype, args.quantize or ""]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"benchmarks: {self.name} failed; its message is above")
        return json.loads(line)

    def run(self, prompts: list[list[int]], new: int) -> dict[str, float]:
        """Seconds to answer, and the process's peak memory so far."""
        assert self._process.stdin
        print(json.dumps({"prompts": prompts, "new": new}), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def prompt_of(length: int) -> list[int]:
    """Ids that any vocabulary has; what they say does not change the work."""
    return [5 + i * 7919 % 900 for i in range(length)]


def rates(workers: list[Worker], rounds: int, batch: int, length: int, new: int) -> dict[str, dict[str, Any]]:
    """Prefill and decode tokens/s of each system, taken in turns. Decoding is the time beyond the first new token."""
    prompts = [prompt_of(length)] * batch
    times: dict[str, list[tuple[float, float]]] = {worker.name: [] for worker in workers}
    for _ in range(rounds):
        for worker in workers:
            first = worker.run(prompts, 1)["seconds"]
            whole = worker.run(prompts, new + 1)["seconds"]
            times[worker.name].append((batch * length / first, batch * new / (whole - first)))
    return {
        name: {"prefill": spread([p for p, _ in pairs]), "decode": spread([d for _, d in pairs])}
        for name, pairs in times.items()
    }


def warm_up(workers: list[Worker], batch: int, length: int, new: int) -> dict[str, float]:
    """The first answer of each system, compilation included, in seconds to the first token; then all sizes once."""
    first = {}
    for worker in workers:
        first[worker.name] = worker.run([prompt_of(length)] * batch, 1)["seconds"]
        worker.run([prompt_of(length)] * batch, new + 1)
    return first


def speed(args: argparse.Namespace, workers: list[Worker]) -> dict[str, Any]:
    """Load, compile, first token, prefill, decode, memory, and the share of the machine's limit."""
    first = warm_up(workers, args.batch, args.prompt, args.new)
    before = machine.read_bandwidth()
    measured = rates(workers, args.rounds, args.batch, args.prompt, args.new)
    bandwidth = max(before, machine.read_bandwidth())
    ours = workers[0].facts
    context = args.prompt + args.new / 2
    per_step = ours["weight_bytes"] + args.batch * ours["cache_bytes_per_token"] * context
    limit = args.batch * bandwidth / per_step
    table = {}
    for worker in workers:
        one = measured[worker.name]
        ttft = args.batch * args.prompt / one["prefill"]["median"]
        table[worker.name] = one | {
            "load_seconds": worker.facts["load_seconds"],
            "first_token_cold_seconds": first[worker.name],
            "compile_seconds": max(0.0, first[worker.name] - ttft),
            "first_token_seconds": ttft,
            "peak_bytes": worker.run([prompt_of(4)], 1)["peak_bytes"],
            "weight_bytes": worker.facts["weight_bytes"],
        }
    return {
        "read_bandwidth": bandwidth, "bytes_per_step": per_step, "decode_limit": limit,
        "decode_share_of_limit": measured["jaxlm"]["decode"]["median"] / limit,
        "matmul_rate": machine.matmul_rate(args.dtype), "systems": table,
    }  # fmt: skip


def over(values: list[int], name: str) -> Callable[[argparse.Namespace, list[Worker]], dict[str, Any]]:
    """The same rates over a range of batch sizes or prompt lengths."""
    def measure(args: argparse.Namespace, workers: list[Worker]) -> dict[str, Any]:
        rows = {}
        for value in values:
            setattr(args, name, value)
            warm_up(workers, args.batch, args.prompt, args.new)
            rows[str(value)] = rates(workers, args.rounds, args.batch, args.prompt, args.new)
        return {"over": name, "systems": rows}

    return measure


QUESTIONS = {
    "speed": speed,
    "batch": over([1, 2, 4, 8, 16], "batch"),
    "context": over([64, 256, 1024, 4096], "prompt"),
}


def show(result: dict[str, Any]) -> None:
    """A table for a person."""
    if "over" in result:
        print(f"{result['over']:>8} {'system':14} {'prefill tok/s':>14} {'decode tok/s':>13}")
        for value, systems in result["systems"].items():
            for name, one in systems.items():
                print(f"{value:>8} {name:14} {one['prefill']['median']:14.1f} {one['decode']['median']:13.1f}")
        return
    bandwidth, step = result["read_bandwidth"] / 1e9, result["bytes_per_step"] / 1e6
    limit = result["decode_limit"]
    print(f"read bandwidth {bandwidth:.1f} GB/s; a step reads {step:.0f} MB: at most {limit:.1f} tok/s")
    print(f"matrix products {result['matmul_rate'] / 1e9:.0f} GFLOP/s")
    heads = f"{'load s':>7} {'compile s':>9} {'first s':>8} {'prefill tok/s':>20} {'decode tok/s':>20} {'peak MB':>8}"
    print(f"{'':14} {heads}")
    for name, one in result["systems"].items():
        cells = [f"{one[k]['median']:.1f} ({one[k]['least']:.0f}-{one[k]['most']:.0f})" for k in ("prefill", "decode")]
        print(
            f"{name:14} {one['load_seconds']:7.2f} {one['compile_seconds']:9.2f} {one['first_token_seconds']:8.3f} "
            f"{cells[0]:>20} {cells[1]:>20} {one['peak_bytes'] / 1e6:8.0f}"
        )
    print(f"jaxlm decodes at {result['decode_share_of_limit']:.2f} of the limit")


def check(result: dict[str, Any], path: Path) -> bool:
    """Whether each ratio of jaxlm to a peer, and its share of the limit, is at least that of the stored baseline."""
    baseline, good = json.loads(path.read_text()), True
    for name, least in baseline.items():
        systems = result["systems"]
        if name == "decode_share_of_limit":
            value = result[name]
        else:
            peer, kind = name.split(":")
            if peer not in systems:
                continue
            value = systems["jaxlm"][kind]["median"] / systems[peer][kind]["median"]
        good &= value >= least
        print(f"{'ok' if value >= least else 'TOO LOW':8} {name} {value:.2f}, at least {least:.2f}")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--quantize", choices=("int8", "int4", "file"), help="weights of jaxlm; peers stay as they are")
    parser.add_argument("--peer", action="append", default=[], choices=PEERS, help="repeatable")
    parser.add_argument("--prompt", type=int, default=512, help="tokens; default %(default)s")
    parser.add_argument("--new", type=int, default=64, help="new tokens; default %(default)s")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="turns that each system gets; default %(default)s")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--check", type=Path, metavar="BASELINE", help="compare ratios with this file; exit 1 if lower")
    args = parser.parse_args()
    missing = [peer for peer in args.peer if importlib.util.find_spec(PEERS[peer]) is None]
    if missing:
        sys.exit(f"benchmarks: {missing[0]} is not installed")
    workers = [Worker(name, args) for name in ("jaxlm", *args.peer)]
    settings = {k: v for k, v in vars(args).items() if k not in ("json", "check")}
    result = QUESTIONS[args.question](args, workers) | {"settings": settings, "machine": machine.description()}
    for worker in workers:
        worker.close()
    show(result)
    print(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.check and not check(result, args.check):
        sys.exit(1)


if __name__ == "__main__":
    main()
