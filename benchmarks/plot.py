"""A result as a picture: lines over x where a table has one, else bars; whiskers from the least to the most."""

import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.questions import median
from benchmarks.turns import BenchError

SUFFIXES = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Raise BenchError unless a picture can be written there."""
    if path.suffix not in SUFFIXES:
        raise BenchError(f"--plot is {path}; allowed: a file that ends in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install 'jaxlm[bench]'")


def draw(found: dict[str, Any], path: Path) -> None:
    """One panel per table, of its first column."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tables = [table for table in found["tables"] if table["rows"]]
    figure, panels = pyplot.subplots(1, len(tables), figsize=(5.5 * len(tables), 4.2), squeeze=False)
    for panel, table in zip(panels[0], tables, strict=True):
        column = next(name for name in table["rows"][0] if name not in ("system", "x"))
        (draw_lines if table["x"] else draw_bars)(panel, table, column)
        panel.set_title(table["title"], fontsize=9)
    settings = found["settings"]
    title = f"{found['question']}: {settings['model']}, {settings['dtype']}, {found['machine']['device']}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def draw_lines(panel: Any, table: dict[str, Any], column: str) -> None:
    """One line per system, on logarithmic axes; the limit is dashed."""
    for system in dict.fromkeys(row["system"] for row in table["rows"]):
        points = [(row["x"], row[column]) for row in table["rows"] if row["system"] == system]
        x, values = zip(*points, strict=True)
        style = {"linestyle": "--", "color": "grey"} if system == "limit" else {"marker": "o", "capsize": 3}
        panel.errorbar(x, [median(v) for v in values], yerr=whiskers(values), label=system, **style)
    panel.set(xscale="log", yscale="log", xlabel=table["x"], ylabel=column)
    panel.legend(fontsize=8)


def draw_bars(panel: Any, table: dict[str, Any], column: str) -> None:
    """One bar per row that has the column."""
    rows = [row for row in table["rows"] if row.get(column) is not None]
    values = [row[column] for row in rows]
    colours = ["lightgrey" if row["system"] == "limit" else "tab:blue" for row in rows]
    panel.bar(range(len(rows)), [median(v) for v in values], yerr=whiskers(values), color=colours, capsize=3)
    panel.set_xticks(range(len(rows)), [row["system"] for row in rows], rotation=30, ha="right", fontsize=8)
    panel.set_ylabel(column)


def whiskers(values: Any) -> list[list[float]]:
    """How far the least lies below each median, and the most above."""
    spreads = [v if isinstance(v, dict) else {"median": v, "least": v, "most": v} for v in values]
    return [[v["median"] - v["least"] for v in spreads], [v["most"] - v["median"] for v in spreads]]
