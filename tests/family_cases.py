"""The table of tiny published-style models, one module per family in `families/`: found by being there.

A module there defines CASES, a tuple of `Case`. Everything else follows from them: the stored references
(`make_references.py`), the plain tests against these, the live parity tests, and the export round trips.
"""

import importlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from foreign import random_weights, save_folder

HERE = Path(__file__).parent
TOLERANCE = 1e-4  # The largest error of a position's logits, as a share of that position's largest logit.


@dataclass(frozen=True)
class Case:
    """One tiny model. config: fields for transformers' config class of `config["model_type"]`.

    length tokens are run: more than twice any window, so that a ring of that size wraps. norm is the mean of norm
    weights (0 for families that add one). tolerance only where a comment at the case says why. The first case of a
    family stands for it in the slower plain tests: let it have what is particular, windows above all. attention: which
    of the published forms of attention is right, where a comment at the case says why not any.
    """

    name: str
    config: Mapping[str, Any]
    length: int = 24
    seed: int = 0
    norm: float = 1.0
    tolerance: float = TOLERANCE
    weights: Mapping[str, float] = field(default_factory=dict)
    attention: str = "eager"

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """The weights of this model; `weights` multiplies those of names that contain its keys."""
        values = random_weights(shapes, self.seed, self.norm)
        for part, factor in self.weights.items():
            values |= {name: a * np.float32(factor) for name, a in values.items() if part in name}
        return values

    def tokens(self) -> np.ndarray:
        """int32 [1, length]."""
        vocab = self.config["vocab_size"]
        return np.random.default_rng([self.seed, 1]).integers(0, vocab, (1, self.length)).astype(np.int32)


def first_cases() -> list[tuple[str, Case]]:
    return [(family, cases(family)[0]) for family in family_names()]


def family_names() -> list[str]:
    return sorted(info.name for info in pkgutil.iter_modules([str(HERE / "families")]))


def cases(family: str) -> tuple[Case, ...]:
    return importlib.import_module(f"families.{family}").CASES


def all_cases() -> list[tuple[str, Case]]:
    return [(family, case) for family in family_names() for case in cases(family)]


def reference_path(family: str) -> Path:
    return HERE / "references" / f"{family}.npz"


def reference(family: str, case: Case) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], np.ndarray]:
    """(config.json, tensor names with shapes, float32 logits [T,V]) that transformers wrote and computed."""
    with np.load(reference_path(family)) as stored:
        about = json.loads(str(stored[f"{case.name}/about"]))
        return about["config"], {n: tuple(s) for n, s in about["shapes"].items()}, stored[f"{case.name}/logits"]


def write_case(folder: Path, family: str, case: Case, dtype: str = "float32") -> Path:
    """The case's checkpoint, made again from its seed."""
    config, shapes, _ = reference(family, case)
    return save_folder(folder, config, case.tensors(shapes), dtype)


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The worst position: largest difference over largest logit. [..., T, V]."""
    return float(np.max(np.max(np.abs(ours - theirs), axis=-1) / np.max(np.abs(theirs), axis=-1)))
