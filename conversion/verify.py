"""How well a checkpoint's numbers agree with the published implementation, layer by layer and at the logits.

The reference is transformers in float32, run here, or a golden file that an earlier run of it left: for every layer a
few fixed random projections of each token's state, and for the logits the largest ones and the sum of all.
"""

import functools
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.errors import CheckpointError, RequestError
from jaxlm.generate import Model
from jaxlm.model import hidden_states, lm_head
from jaxlm.norm import norm

PROMPTS = (
    "The capital of France is Paris, and the capital of Japan is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
    "人工智能正在改变世界。😀 Über",
)
MOST_TOKENS = 32  # Of each prompt.
# Relative, by the dtype of the parameters. In 16 bits, states with a few huge lanes err most where these come up.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
PROJECTIONS, LARGEST = 8, 64
FORMAT = 1


@dataclass(frozen=True)
class Reading:
    """What one implementation says about one prompt of T tokens: L + 1 states [L+1,T,P] and logits [T,V].

    states[0] is the embedding, states[i] what layer i - 1 made of it; the last has passed the final norm. All float64;
    states are projections of the vectors. Of a golden file, logits holds the largest only, the rest being NaN, and
    total the log of the sum of all exponentials [T].
    """

    ids: list[int]
    states: np.ndarray
    logits: np.ndarray
    total: np.ndarray


@dataclass(frozen=True)
class Agreement:
    """The comparison: relative errors are the largest difference over the largest magnitude of the reference.

    layers: per state. kl: the mean divergence of the next-token distributions, in nats, over the logits compared.
    top1: the share of positions where both find the same id most likely. first_departure: the first state beyond the
    tolerance, or None.
    """

    source: str
    reference: str
    dtype: str
    precision: str
    tolerance: float
    layers: list[float]
    logits_max_error: float
    logits_relative_error: float
    kl: float
    top1: float
    first_departure: int | None
    passed: bool


def prompt_ids(model: Model) -> list[list[int]]:
    """The fixed prompts as ids; of a model without a tokenizer, fixed ids."""
    if model.tokenizer is None:
        size = model.config.vocab_size
        return [[(7 + 31 * i * (row + 1)) % size for i in range(MOST_TOKENS)] for row in range(len(PROMPTS))]
    limit = min(MOST_TOKENS, model.config.max_positions)
    return [model.tokenizer.encode(text)[:limit] for text in PROMPTS]


def projection(width: int) -> np.ndarray:
    """The fixed random directions that states are reduced to, float64 [D,P]."""
    return np.random.Generator(np.random.Philox(0)).standard_normal((width, PROJECTIONS)) / np.sqrt(width)


def read_ours(model: Model, ids: list[int]) -> Reading:
    """jaxlm's own numbers."""
    tokens = np.array([ids], np.int32)
    states, logits = _forward(model.params, tokens, model.config)
    return reading(ids, np.asarray(states)[:, 0], np.asarray(logits)[0])


@functools.partial(jax.jit, static_argnums=2)
def _forward(params: Any, tokens: Any, config: Any) -> Any:
    states = hidden_states(params, tokens, config)
    last = norm(params.get("final_norm", {}), states[-1], config.final_norm)
    return jnp.concatenate([states[:-1], last[None]]), lm_head(params, states[-1], config)


def reading(ids: list[int], states: np.ndarray, logits: np.ndarray) -> Reading:
    """Reduce states [L+1,T,D] and keep logits [T,V]."""
    wide = logits.astype(np.float64)
    highest = wide.max(axis=-1)
    total = highest + np.log(np.exp(wide - highest[:, None]).sum(axis=-1))
    return Reading(ids, states.astype(np.float64) @ projection(states.shape[-1]), wide, total)


def transformers_readings(path: Path, prompts: list[list[int]]) -> list[Reading]:
    """The published implementation's numbers, in float32 on the CPU, for a folder or GGUF file that it can read."""
    import torch
    from transformers import AutoModelForCausalLM

    place = (str(path), {}) if path.is_dir() else (str(path.parent), {"gguf_file": path.name})
    reference = AutoModelForCausalLM.from_pretrained(
        place[0], **place[1], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    result = []
    for ids in prompts:
        with torch.inference_mode():
            out = reference(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        states = np.stack([state[0].float().numpy() for state in out.hidden_states])
        result.append(reading(ids, states, out.logits[0].float().numpy()))
    return result


def compare(ours: list[Reading], theirs: list[Reading], tolerance: float, names: dict[str, str]) -> Agreement:
    """The agreement of two implementations on the same prompts. Raises CheckpointError if their shapes differ."""
    for a, b in zip(ours, theirs, strict=True):
        if a.states.shape != b.states.shape or a.logits.shape != b.logits.shape:
            raise CheckpointError(
                f"{names['reference']}: holds states {list(b.states.shape)} and logits {list(b.logits.shape)}; this "
                f"model has {list(a.states.shape)} and {list(a.logits.shape)}"
            )
    pairs = list(zip(ours, theirs, strict=True))
    layers = [
        relative(
            np.concatenate([a.states[i] for a, _ in pairs]), np.concatenate([b.states[i] for _, b in pairs])
        )
        for i in range(len(ours[0].states))
    ]
    mine, other = (np.concatenate([reading.logits for reading in side]) for side in (ours, theirs))
    known = np.isfinite(other)
    logits_error = relative(mine[known], other[known])
    departed = [i for i, error in enumerate(layers) if not error <= tolerance]
    return Agreement(
        **names, tolerance=tolerance, layers=layers,
        logits_max_error=float(np.abs(mine - other)[known].max()), logits_relative_error=logits_error,
        kl=divergence(pairs), top1=float(np.mean(mine.argmax(-1) == np.where(known, other, -np.inf).argmax(-1))),
        first_departure=departed[0] if departed else None,
        passed=bool(logits_error <= tolerance and not departed),
    )  # fmt: skip


def relative(mine: np.ndarray, other: np.ndarray) -> float:
    """The largest difference over the largest magnitude; NaN counts as infinite."""
    error = float(np.abs(mine - other).max() / max(np.abs(other).max(), 1e-30))
    return error if np.isfinite(error) else float("inf")


def divergence(pairs: list[tuple[Reading, Reading]]) -> float:
    """The mean Kullback-Leibler divergence of ours from theirs, over the ids whose logits are known.

    In the form sum p log(p/q) - p + q, which is never negative, whatever share of the ids is known.
    """
    parts = []
    for a, b in pairs:
        known = np.isfinite(b.logits)
        log_p, log_q = b.logits - b.total[:, None], a.logits - a.total[:, None]
        p, q = np.exp(log_p), np.exp(log_q)
        parts.append(np.where(known, p * (log_p - log_q) - p + q, 0.0).sum(axis=-1))
    return float(np.concatenate(parts).mean())


def save_golden(path: Path, readings: list[Reading], source: str) -> None:
    """Write a golden file beside `path` and rename it."""
    arrays: dict[str, np.ndarray] = {"format": np.array(FORMAT), "source": np.array(source)}
    for i, one in enumerate(readings):
        best = np.argsort(-one.logits, axis=-1)[:, :LARGEST].astype(np.int32)
        arrays |= {
            f"ids{i}": np.array(one.ids, np.int32), f"states{i}": one.states.astype(np.float32),
            f"best{i}": best, f"logits{i}": np.take_along_axis(one.logits, best, axis=-1).astype(np.float32),
            f"total{i}": one.total.astype(np.float32), f"vocab{i}": np.array(one.logits.shape[-1]),
        }  # fmt: skip
    beside = path.with_name(path.name + ".partial")
    with beside.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    os.replace(beside, path)


def load_golden(path: Path) -> list[Reading]:
    """What `save_golden` wrote. Raises CheckpointError for a file that is something else or damaged."""
    try:
        with np.load(path, allow_pickle=False) as data:
            if int(data["format"]) != FORMAT:
                raise CheckpointError(f"{path}: golden format {int(data['format'])}; allowed: {FORMAT}")
            count = sum(name.startswith("ids") for name in data.files)
            return [_golden_reading(data, i) for i in range(count)]
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path}: is not a golden file ({error})") from error


def _golden_reading(data: Any, i: int) -> Reading:
    best, vocab = data[f"best{i}"], int(data[f"vocab{i}"])
    if not 0 < vocab < 1 << 24 or best.min() < 0 or best.max() >= vocab:
        raise ValueError(f"vocabulary of {vocab}")
    logits = np.full((len(best), vocab), np.nan)
    np.put_along_axis(logits, best, data[f"logits{i}"].astype(np.float64), axis=-1)
    ids = data[f"ids{i}"].tolist()
    return Reading(ids, data[f"states{i}"].astype(np.float64), logits, data[f"total{i}"].astype(np.float64))


def verify(
    model: Model,
    path: Path,
    *,
    golden: Path | None = None,
    keep_golden: Path | None = None,
    tolerance: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Agreement:
    """Compare a loaded model with transformers, or with a golden file.

    path: what it was loaded from; what transformers cannot read (a jaxlm checkpoint) is exported for it first.
    keep_golden: also write the reference's numbers there. Raises RequestError where there is no reference.
    """
    if golden is not None:
        theirs, reference = load_golden(golden), str(golden)
    else:
        theirs, reference = _live(model, path, say), "transformers"
    bad = [i for one in theirs for i in one.ids if not 0 <= i < model.config.vocab_size]
    if bad:
        raise CheckpointError(f"{reference}: holds id {bad[0]}; this model's vocabulary has {model.config.vocab_size}")
    say("running jaxlm")
    ours = [read_ours(model, one.ids) for one in theirs]
    if keep_golden is not None:
        save_golden(keep_golden, theirs, model.name)
    config = model.config
    names = {"source": model.name, "reference": reference, "dtype": config.dtype, "precision": config.precision}
    return compare(ours, theirs, TOLERANCE[config.dtype] if tolerance is None else tolerance, names)


def _live(model: Model, path: Path, say: Callable[[str], None]) -> list[Reading]:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise RequestError(
                f"no reference: {name} is not installed (pip install 'jaxlm[parity]') and no --golden file is given"
            )
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    say("running transformers")
    if not (path / "jaxlm.json").exists():
        return transformers_readings(path, prompt_ids(model))
    from jaxlm.checkpoints import read_checkpoint
    from jaxlm.conversion.export import export_hf

    with tempfile.TemporaryDirectory() as folder:
        export_hf(model.config, model.params, read_checkpoint(path).source_config or {}, Path(folder) / "hf")
        return transformers_readings(Path(folder) / "hf", prompt_ids(model))


def render(found: Agreement) -> str:
    """The agreement as lines for a person."""
    lines = [f"{found.source} in {found.dtype} (matmul precision {found.precision}) against {found.reference}"]
    for i, error in enumerate(found.layers):
        name = "embedding" if i == 0 else f"layer {i - 1}" + (", final norm" if i == len(found.layers) - 1 else "")
        lines.append(f"  {name:<24} {error:9.2e}" + ("  beyond the tolerance" if not error <= found.tolerance else ""))
    largest = f"largest difference {found.logits_max_error:.2e}"
    lines.append(f"  {'logits':<24} {found.logits_relative_error:9.2e}  {largest}")
    lines.append(f"  KL {found.kl:.2e} nats, the likeliest id agrees at {100 * found.top1:.1f} % of positions")
    lines.append(f"{'PASS' if found.passed else 'FAIL'}: tolerance {found.tolerance:g} relative")
    return "\n".join(lines)


def as_json(found: Agreement) -> str:
    return json.dumps(asdict(found))
