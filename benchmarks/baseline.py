"""Ratios that a run must reach: a file of bounds by question, model and dtype.

    {"decode smollm2-135m-instruct float32": {"decode MBU": {"least": 0.6}, "load / transformers": {"most": 0.4}}}
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.turns import BenchError

MARGIN = 0.15  # A stored bound lies this much below, or above, what was measured.


def key_of(found: dict[str, Any]) -> str:
    """Under what a run's bounds are stored."""
    settings = found["settings"]
    parts = [found["question"], settings["model"], settings["dtype"], settings["quantize"]]
    return " ".join(part for part in parts if part)


def read(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """The stored bounds. Raises BenchError for a file that is not there, no JSON, or no such bounds."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BenchError(f"{path} is no JSON: {error}") from error
    ok = isinstance(data, dict) and all(isinstance(bounds, dict) for bounds in data.values())
    for bounds in data.values() if ok else ():
        ok = ok and all(is_bound(bound) for bound in bounds.values())
    if not ok:
        raise BenchError(f'{path} must hold {{run: {{ratio: {{"least" or "most": number}}}}}}')
    return data


def is_bound(bound: Any) -> bool:
    return (
        isinstance(bound, dict)
        and len(bound) == 1
        and all(name in ("least", "most") and isinstance(value, (int, float)) for name, value in bound.items())
    )


def select(baseline: dict[str, Any], key: str, path: Path) -> dict[str, dict[str, float]]:
    """The bounds of a run. Raises BenchError where there are none."""
    if key not in baseline:
        raise BenchError(f"{path} has nothing for {key!r}; it has {', '.join(map(repr, baseline)) or 'nothing'}")
    return baseline[key]


def verdicts(bounds: dict[str, dict[str, float]], ratios: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """(whether it holds, a line) for each bound; a ratio to a peer that did not run is passed over, and said so."""
    for name, bound in bounds.items():
        (kind, limit), = bound.items()
        if name not in ratios:
            yield True, f"skipped   {name}: not in this run"
            continue
        value = ratios[name]["value"]
        good = value >= limit if kind == "least" else value <= limit
        word = "ok" if good else "TOO LOW" if kind == "least" else "TOO HIGH"
        yield good, f"{word:9} {name}: {value:.3g}, at {kind} {limit:.3g}"


def store(path: Path, key: str, ratios: dict[str, Any]) -> None:
    """Put a run's ratios, less a margin, among the file's bounds."""
    baseline = read(path) if path.exists() else {}
    baseline[key] = {
        name: {"least": round(ratio["value"] * (1 - MARGIN), 3)}
        if ratio["better"] == "higher"
        else {"most": round(ratio["value"] * (1 + MARGIN), 3)}
        for name, ratio in ratios.items()
    }
    path.write_text(json.dumps(dict(sorted(baseline.items())), indent=1) + "\n")
