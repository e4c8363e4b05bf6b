"""A result as tables for a person and as one JSON object."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.questions import Result, Table
from benchmarks.turns import Bench, spread


def summary(bench: Bench, result: Result, settings: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """Everything that a run found, ready for JSON."""
    return {
        "question": bench.question, "settings": settings, "machine": machine, "ceilings": ceilings(bench),
        **asdict(result), "notes": bench.notes, "systems": {w.name: w.facts for w in bench.workers},
    }  # fmt: skip


def ceilings(bench: Bench) -> dict[str, Any]:
    """Spread of the measured ceilings, and by what they were measured."""
    if not bench.ceilings:
        return {}
    names = ("read_bandwidth", "matmul_rate")
    spreads = {name: spread([c[name] for c in bench.ceilings]) for name in names}
    return spreads | {"read_bandwidth_by": bench.ceilings[0]["read_bandwidth_by"]}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The result as text: machine, ceilings, tables, ratios, notes."""
    machine, settings = found["machine"], found["settings"]
    yield f"{machine['device']}, {machine['cores']} cores, {machine['backend']}, jax {machine['jax']}"
    if found["question"] != "convert":  # It makes its own.
        yield f"{settings['model']} in {settings['dtype']}{', ' + settings['quantize'] if settings['quantize'] else ''}"
    limits = found["ceilings"]
    if limits:
        bandwidth, rate = limits["read_bandwidth"], limits["matmul_rate"]
        yield f"read bandwidth {cell(scale(bandwidth, 1e-9))} GB/s, by {limits['read_bandwidth_by']}"
        yield f"matrix products {cell(scale(rate, 1e-9))} GFLOP/s"
    for table in found["tables"]:
        yield ""
        yield from table_lines(Table(**table))
    yield ""
    for name, ratio in found["ratios"].items():
        yield f"{name}: {ratio['value']:.2f}" + (" (lower is better)" if ratio["better"] == "lower" else "")
    for note in found["notes"]:
        yield f"note: {note}"


def table_lines(table: Table) -> Iterator[str]:
    """A heading, the columns' names, a line per row."""
    columns = list(dict.fromkeys(name for row in table.rows for name in row if name not in ("system", "x")))
    heads = [*([table.x] if table.x else []), "", *columns]
    body = [
        [*([str(row["x"])] if table.x else []), row["system"], *(cell(row.get(name)) for name in columns)]
        for row in table.rows
    ]
    widths = [max(len(line[i]) for line in [heads, *body]) for i in range(len(heads))]
    names = 1 if table.x else 0  # The column of names stands left, numbers right.
    yield table.title
    for line in [heads, *body]:
        cells = [c.ljust(w) if i == names else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def cell(value: Any) -> str:
    """A number, or "median (least-most)"."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{number(value['median'])} ({number(value['least'])}-{number(value['most'])})"
    return number(value)


def number(value: float) -> str:
    """About three digits."""
    size = abs(value)
    return f"{value:.0f}" if size >= 100 or value == 0 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def scale(values: dict[str, float], factor: float) -> dict[str, float]:
    return {name: factor * value for name, value in values.items()}
