"""From prompts to text, whole (`generate`) or as it comes (`stream`)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import ModelConfig
from jaxlm.detokenize import Detokenizer, StopStrings
from jaxlm.errors import JaxlmError, JaxlmTypeError, RequestError
from jaxlm.loop import LENGTH, MOST_STEPS, REFUSED, RUNNING, STOP, Settings, token_chunks
from jaxlm.params import Params
from jaxlm.sample import check_settings
from jaxlm.tokenizer import Tokenizer

STEPS_BETWEEN_LOOKS = 16  # Device steps between two looks at stop strings.


@dataclass(frozen=True)
class Model:
    """A config, its parameters, and what turns text into ids and back.

    tokenizer may be None: then prompts are id lists, and texts are empty. eos_ids end a generation.
    """

    config: ModelConfig
    params: Params = field(repr=False)
    tokenizer: Tokenizer | None = field(default=None, repr=False)
    eos_ids: tuple[int, ...] = ()
    name: str = ""


@dataclass(frozen=True)
class Generation:
    """One answer. token_ids holds every generated id, a closing end-of-sequence id included, which text does not show.

    finish_reason: "stop" for an end-of-sequence id or a stop string, "length" for the limit of new tokens or context.
    """

    text: str
    token_ids: list[int]
    prompt_ids: list[int]
    finish_reason: str


class Answer:
    """The text of one row while it grows: ids in, pieces of text out, cut before the first stop string."""

    def __init__(self, model: Model, prompt_ids: list[int], stops: tuple[str, ...], ignore_eos: bool):
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.text = ""
        self.reason: str | None = None
        self._stops = StopStrings(stops)
        self._detokenizer = Detokenizer(model.tokenizer, prompt_ids) if model.tokenizer else None
        self._unseen = () if ignore_eos else model.eos_ids

    def push(self, ids: Iterable[int], reason: str | None) -> str:
        """Take the next ids, the last of which is final if `reason` says so; -> the text that they make sure."""
        piece = ""
        for token in ids:
            if self.reason:
                break
            self.token_ids.append(token)
            if self._detokenizer and token not in self._unseen:
                piece += self._stops.feed(self._detokenizer.feed(token))
            self.reason = "stop" if self._stops.stopped else None
        if reason and not self.reason:
            tail = self._detokenizer.flush() if self._detokenizer else ""
            piece += self._stops.feed(tail) + self._stops.flush()
            self.reason = "stop" if self._stops.stopped else reason
        self.text += piece
        return piece

    def done(self) -> Generation:
        return Generation(self.text, self.token_ids, self.prompt_ids, self.reason or "length")


def generate(
    model: Model,
    prompts: str | Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    repetition_penalty: Any = 1.0,
    seed: Any = 0,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
) -> list[Generation]:
    """Answer each prompt: a text, a list of texts, or a list of id lists.

    Settings are a number or one per prompt. temperature 0 is greedy; 0 turns top_k and min_p off, 1 top_p and
    repetition_penalty; the penalty counts the ids of the prompt too. Prompt i uses seed + i unless seed is a list, so
    its result is that of running alone with that seed. A text gets the tokenizer's BOS, once; ids are taken as given.
    Raises RequestError before compute for an empty prompt where there is no BOS, an id outside the vocabulary, a prompt
    that fills the context, or a setting out of range; JaxlmError when logits turn out to be NaN.
    """
    rows = encode_prompts(model, prompts)
    settings = make_settings(
        model, rows, max_new_tokens, seed, ignore_eos, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty,
    )  # fmt: skip
    stops = check_stops(stop)
    answers = [Answer(model, ids, stops, ignore_eos) for ids in rows]
    steps = STEPS_BETWEEN_LOOKS if stops else MOST_STEPS
    if max_new_tokens > 0:
        for _ in run(model, answers, settings, steps):
            pass
    return [answer.done() for answer in answers]


def stream(
    model: Model, prompt: str | Sequence[int], *, max_new_tokens: int = 128, seed: Any = 0,
    stop: str | Sequence[str] = (), ignore_eos: bool = False, **sampling: Any,
) -> Iterator[str]:  # fmt: skip
    """The same for one prompt, piece by piece; the pieces join to `Generation.text`. Bad input raises at the call."""
    rows = encode_prompts(model, prompt if isinstance(prompt, str) else [prompt])
    settings = make_settings(model, rows, max_new_tokens, seed, ignore_eos, **sampling)
    answer = Answer(model, rows[0], check_stops(stop), ignore_eos)
    pieces = run(model, [answer], settings, 1) if max_new_tokens > 0 else iter(())
    return (piece for (piece,) in pieces if piece)


def run(model: Model, answers: list[Answer], settings: Settings, steps: int) -> Iterator[list[str]]:
    """Drive the device loop, `steps` at a time, until every answer is complete; -> each answer's next piece.

    Raises JaxlmError when logits leave an answer nothing to choose, unless a stop string has completed it before.
    """
    prompts = [answer.prompt_ids for answer in answers]
    reasons = {RUNNING: None, REFUSED: None, STOP: "stop", LENGTH: "length"}
    for new, status in token_chunks(model.params, model.config, prompts, settings, steps):
        yield [a.push(ids, reasons[s]) for a, ids, s in zip(answers, new, status.tolist(), strict=True)]
        for row, answer in enumerate(answers):
            if status[row] == REFUSED and not answer.reason:
                where = f"prompt {row}: the logits of new token {len(answer.token_ids) + 1}"
                raise JaxlmError(f"{where} hold NaN or +inf, or no id that may be chosen")
        if all(answer.reason for answer in answers):
            return


def encode_prompts(model: Model, prompts: Any) -> list[list[int]]:
    """Id lists for what `generate` accepts, each checked against the vocabulary and the context."""
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, Sequence) or not prompts:
        raise RequestError(f"prompts are {prompts!r}; allowed: a text, or a list of at least one text or id list")
    return [check_prompt(model, f"prompt {i}", encode_prompt(model, f"prompt {i}", p)) for i, p in enumerate(prompts)]


def encode_prompt(model: Model, where: str, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise RequestError(f"{where} is a text, but the model has no tokenizer; allowed: a list of ids")
        return model.tokenizer.encode(prompt)
    ids = as_array(where, prompt)
    if ids.ndim == 1 and not ids.size:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise JaxlmTypeError(f"{where} is a {type(prompt).__name__}; allowed: a text or a list of integer ids")
    return [int(i) for i in ids]


def as_array(name: str, value: Any) -> np.ndarray:
    """numpy's reading of a value; refused if it has none."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise JaxlmTypeError(f"{name} is {value!r}; allowed: a number or a flat list of numbers") from None


def check_stops(stop: Any) -> tuple[str, ...]:
    """One string or several, as a tuple; what is in it is checked by `StopStrings`."""
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Sequence):
        raise JaxlmTypeError(f"stop is {stop!r}; allowed: a text or a list of texts")
    return tuple(stop)


def check_prompt(model: Model, where: str, ids: list[int]) -> list[int]:
    """The ids, or BOS for none, if the model can take them."""
    if not ids:
        if model.tokenizer is None or model.tokenizer.bos_id is None:
            raise RequestError(f"{where} is empty and the model has no BOS to start from; allowed: at least one token")
        ids = [model.tokenizer.bos_id]
    bad = [i for i in ids if not 0 <= i < model.config.vocab_size]
    if bad:
        raise RequestError(f"{where} holds the token id {bad[0]}; allowed: 0 to {model.config.vocab_size - 1}")
    if len(ids) >= model.config.max_positions:
        limit = model.config.max_positions
        raise RequestError(f"{where} has {len(ids)} tokens; the model's context of {limit} leaves room for {limit - 1}")
    return ids


def make_settings(
    model: Model, rows: list[list[int]], max_new_tokens: int, seed: Any, ignore_eos: bool, *,
    temperature: Any = 0.0, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0, repetition_penalty: Any = 1.0,
) -> Settings:  # fmt: skip
    """Check every setting and lay it out by row."""
    sampling = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    for name, value in sampling.items():
        as_array(name, value)
    check_settings(**sampling)
    if not isinstance(max_new_tokens, Integral) or isinstance(max_new_tokens, bool) or max_new_tokens < 0:
        raise RequestError(f"max_new_tokens is {max_new_tokens!r}; allowed: an integer of at least 0")
    batch, config = len(rows), model.config
    limits = [min(max_new_tokens, config.max_positions - len(ids)) for ids in rows]
    size, tokenizer = config.vocab_size, model.tokenizer
    known = tokenizer.token_mask(size) if tokenizer else np.ones(size, bool)
    return Settings(
        temperature=by_row("temperature", temperature, batch, np.float32),
        top_k=by_row("top_k", np.minimum(top_k, config.vocab_size), batch, np.int32),
        top_p=by_row("top_p", top_p, batch, np.float32),
        min_p=by_row("min_p", min_p, batch, np.float32),
        repetition_penalty=by_row("repetition_penalty", repetition_penalty, batch, np.float32),
        keys=jax.vmap(jax.random.key)(row_seeds(seed, batch)),
        max_new_tokens=jnp.asarray(limits, jnp.int32),
        # No id is -2: so many of them whether the ends count or not, for the shape to be the same.
        eos_ids=jnp.asarray([-2 if ignore_eos else i for i in (*model.eos_ids, -2)], jnp.int32),
        allowed=jnp.asarray(known),
    )


def by_row(name: str, value: Any, batch: int, dtype: Any) -> jax.Array:
    array = as_array(name, value)
    if array.shape not in ((), (batch,)):
        raise RequestError(f"{name} has {array.size} values; allowed: one, or one for each of the {batch} prompts")
    if array.dtype.kind == "f":  # Beyond float32 is as good as its end.
        array = np.clip(array, 0.0, np.finfo(np.float32).max)
    return jnp.asarray(np.broadcast_to(array.astype(dtype), (batch,)))


def row_seeds(seed: Any, batch: int) -> jax.Array:
    """uint32 [B]: seed + row, or the list as it is."""
    array = as_array("seed", seed)
    if array.dtype.kind not in "iu" or array.min(initial=0) < 0 or array.max(initial=0) >= 2**32:
        raise RequestError(f"seed is {seed!r}; allowed: an integer from 0 to {2**32 - 1}, or one per prompt")
    if array.ndim == 0:
        array = (int(array) + np.arange(batch, dtype=np.uint64)) % 2**32
    return by_row("seed", array, batch, np.uint32)
