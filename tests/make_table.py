"""Write the README's table of families: `python tests/make_table.py`. The errors are measured here, on the tiny models.

Each case's checkpoint is made from its seed, loaded, and compared with the logits that transformers computed.
"""

import sys
import tempfile
from pathlib import Path

from family_cases import cases, family_names, reference, relative_error, write_case
from family_checks import logits_at_once

from jaxlm.conversion import load_source
from jaxlm.conversion.families import by_model_type
from jaxlm.conversion.family import Family

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- families -->\n", "<!-- end of families -->\n"


def measure(name: str) -> tuple[Family, float]:
    """The family and the worst relative error of its cases, over all positions, in float32."""
    worst = 0.0
    for case in cases(name):
        with tempfile.TemporaryDirectory() as folder:
            loaded = load_source(write_case(Path(folder) / "model", name, case))
        _, _, theirs = reference(name, case)
        ours = logits_at_once(loaded.params, case.tokens(), loaded.config)
        worst = max(worst, relative_error(ours, theirs))
    return by_model_type(cases(name)[0].config["model_type"]), worst


def row(name: str) -> str:
    family, worst = measure(name)
    formats = "safetensors" + (", GGUF" if family.gguf else "")
    print(f"{name}: {worst:.1e}", file=sys.stderr)
    return f"| {name} | {formats} | safetensors | {len(cases(name))} | {worst:.1e} |"


def main() -> None:
    head = ["| family | in | out | models compared | worst relative error |", "| --- | --- | --- | --- | --- |"]
    table = "\n".join(head + [row(name) for name in family_names()]) + "\n"
    text = README.read_text()
    before, rest = text.split(BEGIN)
    README.write_text(before + BEGIN + table + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
