"""One answer each: a question is a function from a `Bench` with its systems loaded and the arguments to a `Result`."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.turns import Answers, Bench, spread


@dataclass(frozen=True)
class Ratio:
    """A figure that can be compared between runs: jaxlm over a peer, or over what the arithmetic says."""

    value: float
    better: str = "higher"


@dataclass
class Table:
    """Rows {"system": name, "x": number or absent, column: number or spread}; the first column is what a plot shows."""

    title: str
    rows: list[dict[str, Any]]
    x: str = ""


@dataclass
class Result:
    """What a question found."""

    tables: list[Table] = field(default_factory=list)
    ratios: dict[str, Ratio] = field(default_factory=dict)


def step_bytes(bench: Bench, system: str, cost: dict[str, float]) -> float:
    """The least that a step of this system reads: jaxlm's own weights and cache, torch's of the dtype, llama.cpp's file
    and a 16-bit cache."""
    if system == "llama-cpp":
        file = next(w.facts["weight_bytes"] for w in bench.workers if w.name == system)
        return file + cost["half"]
    return cost["own" if system == "jaxlm" else "plain"]


def least_seconds(bench: Bench, nbytes: float, flops: float) -> float:
    """What the machine's ceilings allow: the longer of reading and computing."""
    return max(nbytes / bench.ceiling("read_bandwidth"), flops / bench.ceiling("matmul_rate"))


def scaled(values: list[float], factor: float) -> dict[str, float]:
    return spread([factor * value for value in values])


def rates(answers: Answers, work: float) -> dict[str, list[float]]:
    """work / seconds of every turn, by system that had any."""
    return {name: [work / answer["seconds"] for answer in turns] for name, turns in answers.items() if turns}


def median(value: Any) -> float:
    """Of a spread, or of a number alone."""
    return value["median"] if isinstance(value, dict) else value


def compute_rows(
    bench: Bench, found: dict[str, list[float]], column: str, work: int, flops: float, **more: Any
) -> list[dict[str, Any]]:
    """Rows of token rates, jaxlm's first, with their share of the matrix-product rate (MFU), and the limit's; `flops`
    are those of `work` tokens."""
    limit = work * bench.ceiling("matmul_rate") / flops
    rows = [
        {"system": name, **more, column: spread(values), "MFU": scaled(values, 1 / limit),
         "seconds": spread([work / value for value in values])}
        for name, values in found.items()
    ]  # fmt: skip
    return [*rows, {"system": "limit", **more, column: limit, "MFU": 1.0, "seconds": work / limit}]


def beside_peers(found: dict[str, list[float]], what: str, better: str = "higher") -> dict[str, Ratio]:
    """Ratios of jaxlm's median to each peer's."""
    ours = spread(found["jaxlm"])["median"]
    peers = {name: spread(values)["median"] for name, values in found.items() if name != "jaxlm"}
    return {f"{what} / {name}": Ratio(ours / median, better) for name, median in peers.items()}
