"""From prompts to text, whole (`generate`) or as it comes (`stream`)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxlm.config import ModelConfig
from jaxlm.detokenize import Detokenizer, StopStrings
from jaxlm.errors import JaxlmError, JaxlmTypeError, RequestError
from jaxlm.loop import LENGTH, MOST_STEPS, REFUSED, RUNNING, STOP, Decoder, PlainDecoder, Settings, token_chunks
from jaxlm.params import Params
from jaxlm.reuse import PrefixStore
from jaxlm.sample import as_array, check_settings
from jaxlm.speculate import SpeculativeDecoder
from jaxlm.tokenizer import Tokenizer

STEPS_BETWEEN_LOOKS = 16  # Device steps between two looks at stop strings.
DRAFT_TOKENS = 7  # With the token before them, as many rows as CPU kernels take at once.
MOST_DRAFT = 64


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


@dataclass(frozen=True)
class Request:
    """What is asked of a model, checked: sampling settings by name, each one number or one per prompt, seeds alike."""

    sampling: dict[str, np.ndarray]
    seeds: np.ndarray
    max_new_tokens: int
    stops: tuple[str, ...]
    ignore_eos: bool


class Answer:
    """The text of one row while it grows: ids in, pieces of text out, cut before the first stop string."""

    def __init__(self, model: Model, prompt_ids: list[int], request: Request):
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.text = ""
        self.reason: str | None = None
        self._stops = StopStrings(request.stops)
        self._detokenizer = Detokenizer(model.tokenizer, prompt_ids) if model.tokenizer else None
        self._unseen = () if request.ignore_eos else model.eos_ids

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
    reuse: PrefixStore | None = None,
    draft: "Literal['lookup'] | Model | None" = None,
    draft_tokens: int = DRAFT_TOKENS,
) -> list[Generation]:
    """Answer each prompt: a text, a list of texts, or a list of id lists.

    Settings are a number or one per prompt. temperature 0 is greedy; 0 turns top_k and min_p off, 1 top_p and
    repetition_penalty; the penalty counts the ids of the prompt too. Prompt i uses seed + i unless seed is a list, so
    its result is that of running alone with that seed. A text gets the tokenizer's BOS, once; ids are taken as given.
    reuse: a store of earlier rows, from which prompts that begin like one of them start, and which keeps these rows.
    draft: "lookup" guesses `draft_tokens` tokens a step from what followed the last ones earlier in prompt and answer,
    a smaller Model with the same vocabulary by generating them; the answer stays what it is without (`speculate`).
    Raises RequestError before compute for an empty prompt where there is no BOS, an id outside the vocabulary, a prompt
    that fills the context, or a setting out of range; JaxlmError when logits turn out to be NaN.
    """
    rows = encode_prompts(model, prompts)
    request = check_request(
        len(rows), max_new_tokens=max_new_tokens, seed=seed, stop=stop, ignore_eos=ignore_eos, temperature=temperature,
        top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
    )  # fmt: skip
    decoder, store = make_decoder(model, draft, draft_tokens), check_store(reuse)
    answers = [Answer(model, ids, request) for ids in rows]
    for _ in run(model, decoder, answers, request, STEPS_BETWEEN_LOOKS if request.stops else MOST_STEPS, store):
        pass
    return [answer.done() for answer in answers]


def stream(
    model: Model, prompt: str | Sequence[int], *, reuse: PrefixStore | None = None,
    draft: "Literal['lookup'] | Model | None" = None, draft_tokens: int = DRAFT_TOKENS, **request: Any,
) -> Iterator[str]:  # fmt: skip
    """The same for one prompt, piece by piece; the pieces join to `Generation.text`. Bad input raises at the call."""
    rows = encode_prompts(model, prompt if isinstance(prompt, str) else [prompt])
    checked = check_request(**request)
    decoder, store = make_decoder(model, draft, draft_tokens), check_store(reuse)
    pieces = run(model, decoder, [Answer(model, rows[0], checked)], checked, 1, store)
    return (piece for (piece,) in pieces if piece)


def run(
    model: Model, decoder: Decoder, answers: list[Answer], request: Request, steps: int, store: PrefixStore | None
) -> Iterator[list[str]]:
    """Drive the device loop, `steps` at a time, until every answer is complete; -> each answer's next piece.

    Raises JaxlmError when logits leave an answer nothing to choose, unless a stop string has completed it before.
    """
    if not request.max_new_tokens:
        return
    prompts = [answer.prompt_ids for answer in answers]
    reasons = {RUNNING: None, REFUSED: None, STOP: "stop", LENGTH: "length"}
    settings = lay_out(model, prompts, request)
    for new, status in token_chunks(decoder, prompts, settings, steps, store):
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


def check_stops(stop: Any) -> tuple[str, ...]:
    """One stop string or several, as a tuple."""
    if not isinstance(stop, (str, Sequence)):
        raise JaxlmTypeError(f"stop is {stop!r}; allowed: a text or a list of texts")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    StopStrings(stops)  # Refuses what is no stop string.
    return stops


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


def check_request(
    rows: int = 1, *, max_new_tokens: Any = 128, seed: Any = 0, stop: Any = (), ignore_eos: bool = False,
    **sampling: Any,
) -> Request:  # fmt: skip
    """A request for `rows` prompts, as far as it can be checked without a model; RequestError if out of range."""
    settings = check_settings(**sampling, rows=rows)
    if not isinstance(max_new_tokens, Integral) or isinstance(max_new_tokens, bool) or max_new_tokens < 0:
        raise RequestError(f"max_new_tokens is {max_new_tokens!r}; allowed: an integer of at least 0")
    seeds = as_array("seed", seed)
    if seeds.dtype.kind not in "iu" or seeds.min(initial=0) < 0 or seeds.max(initial=0) >= 2**32:
        raise RequestError(f"seed is {seed!r}; allowed: an integer from 0 to {2**32 - 1}, or one per prompt")
    if seeds.shape not in ((), (rows,)):
        raise RequestError(f"seed has {seeds.size} values; allowed: one, or one for each of the {rows} prompts")
    return Request(settings, seeds, int(max_new_tokens), check_stops(stop), ignore_eos)


def check_store(reuse: Any) -> PrefixStore | None:
    if reuse is not None and not isinstance(reuse, PrefixStore):
        raise JaxlmTypeError(f"reuse is {reuse!r}; allowed: a PrefixStore or None")
    return reuse


def make_decoder(model: Model, draft: Any, draft_tokens: Any) -> Decoder:
    """The way to decode. Raises RequestError for a draft model with another vocabulary, or a count out of range."""
    plain = PlainDecoder(model.params, model.config)
    count = check_draft_tokens(draft_tokens)
    if draft is None:
        return plain
    if isinstance(draft, Model):
        check_vocabularies(model, draft)
        return SpeculativeDecoder(plain, PlainDecoder(draft.params, draft.config), count)
    if not isinstance(draft, str) or draft != "lookup":
        raise JaxlmTypeError(f"draft is {draft!r}; allowed: None, 'lookup' or a Model")
    return SpeculativeDecoder(plain, None, count)


def check_draft_tokens(count: Any) -> int:
    if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or not 1 <= count <= MOST_DRAFT:
        raise RequestError(f"draft_tokens is {count!r}; allowed: an integer from 1 to {MOST_DRAFT}")
    return int(count)


def check_vocabularies(model: Model, draft: Model) -> None:
    """Refuse a draft model whose ids do not mean what the model's do."""
    sizes = [each.config.vocab_size for each in (model, draft)]
    if sizes[0] != sizes[1]:
        raise RequestError(f"draft has a vocabulary of {sizes[1]} ids; allowed: {sizes[0]}, as the model has")
    if model.tokenizer and draft.tokenizer:
        other = first_difference(model.tokenizer, draft.tokenizer)
        if other is not None:
            texts = [each.token_text(other) for each in (model.tokenizer, draft.tokenizer)]
            raise RequestError(f"draft reads id {other} as {texts[1]!r}; allowed: {texts[0]!r}, as the model does")


@lru_cache(maxsize=8)
def first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """The first id that two vocabularies spell differently."""
    if one is other:
        return None
    ids = range(max(one.vocab_size, other.vocab_size))
    return next((i for i in ids if one.token_text(i) != other.token_text(i)), None)


def lay_out(model: Model, prompts: list[list[int]], request: Request) -> Settings:
    """The request's settings for the device, by row."""
    batch, config, tokenizer = len(prompts), model.config, model.tokenizer
    given, seeds = request.sampling, request.seeds
    if seeds.ndim == 0:
        seeds = (int(seeds) + np.arange(batch, dtype=np.uint64)) % 2**32
    known = tokenizer.token_mask(config.vocab_size) if tokenizer else np.ones(config.vocab_size, bool)
    limits = [min(request.max_new_tokens, config.max_positions - len(ids)) for ids in prompts]
    return Settings(
        temperature=by_row(given["temperature"], batch, np.float32),
        top_k=by_row(np.minimum(given["top_k"], config.vocab_size), batch, np.int32),
        top_p=by_row(given["top_p"], batch, np.float32),
        min_p=by_row(given["min_p"], batch, np.float32),
        repetition_penalty=by_row(given["repetition_penalty"], batch, np.float32),
        keys=jax.vmap(jax.random.key)(by_row(seeds, batch, np.uint32)),
        max_new_tokens=jnp.asarray(limits, jnp.int32),
        # No id is -2: so many of them whether the ends count or not, for the shape to be the same.
        eos_ids=jnp.asarray([-2 if request.ignore_eos else i for i in (*model.eos_ids, -2)], jnp.int32),
        allowed=jnp.asarray(known),
    )


def by_row(array: np.ndarray, batch: int, dtype: Any) -> jax.Array:
    """A number, or one per row, as [B]."""
    if array.dtype.kind == "f":  # Beyond float32 is as good as its end.
        array = np.clip(array, 0.0, np.finfo(np.float32).max)
    return jnp.asarray(np.broadcast_to(array.astype(dtype), (batch,)))
