"""What the commands do, one function each, given the parsed flags; they return an exit code, or None for 0."""

import argparse
import codecs
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from jaxlm.errors import RequestError
from jaxlm.generate import check_draft_tokens
from jaxlm.load import convert, load


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    return {name: getattr(args, name) for name in names}


def run_generate(args: argparse.Namespace) -> None:
    from jaxlm.generate import check_request, generate, stream

    if args.raw and args.system:
        raise RequestError("--system needs the chat template, which --raw leaves out; allowed: one of them")
    check_request(**sampling(args))
    text = read_stdin(sys.stdin.read) if args.prompt == "-" else args.prompt
    model = load_model(args)
    settings = sampling(args) | drafting(args)
    prompt: Any = text if args.raw else chat_prompt(model, messages_of(args.system, text))
    if args.json:
        answer = generate(model, [prompt], **settings)[0]
        print_json(asdict(answer))
        return
    show(stream(model, prompt, **settings))


def run_chat(args: argparse.Namespace) -> None:
    from jaxlm.generate import check_request, stream
    from jaxlm.reuse import PrefixStore

    check_request(**sampling(args))
    model = load_model(args)
    settings, store = sampling(args) | drafting(args), PrefixStore()
    messages = messages_of(args.system)
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        raise RequestError(f"{args.model} has no chat template; use: jaxlm generate --raw")
    while line := ask():
        messages.append({"role": "user", "content": line})
        answer = show(stream(model, chat_prompt(model, messages), reuse=store, **settings))
        messages.append({"role": "assistant", "content": answer})


def run_convert(args: argparse.Namespace) -> None:
    with progress_bar("converting", args.quiet) as progress:
        report = None if args.quiet else lambda line: print(line, file=sys.stderr)
        convert(args.source, args.dest, dtype=args.dtype, force=args.force, progress=progress, report=report)
    print(f"wrote {args.dest}", file=sys.stderr)


def run_export(args: argparse.Namespace) -> None:
    from jaxlm.load import export

    with progress_bar(f"loading {args.source}", args.quiet) as progress:
        export(args.source, args.dest, force=args.force, progress=progress)
    print(f"wrote {args.dest}", file=sys.stderr)


def run_verify(args: argparse.Namespace) -> int:
    from jaxlm.checkpoints import resolve
    from jaxlm.conversion.verify import as_json, render, verify

    with progress_bar(f"loading {args.source}", args.quiet) as progress:
        model = load(args.source, dtype=args.dtype, progress=progress)
    found = verify(
        model, resolve(args.source), golden=args.golden, keep_golden=args.save_golden, tolerance=args.tolerance,
        say=lambda line: None if args.quiet else print(line, file=sys.stderr),
    )  # fmt: skip
    print(as_json(found) if args.json else render(found))
    return 0 if found.passed else 1


def run_warmup(args: argparse.Namespace) -> None:
    from jaxlm.warm import warmup

    model = load_model(args)
    warmup(
        model, batch=args.batch, max_len=args.max_len, reuse=True, say=lambda line: print(line, file=sys.stderr),
        **drafting(args),
    )  # fmt: skip


def run_info(args: argparse.Namespace) -> None:
    from jaxlm.info import describe, render

    facts = describe(args.source)
    if args.json:
        print_json(facts)
    else:
        print(render(facts))


def load_model(args: argparse.Namespace) -> Any:
    """The model that --model names, after a look at what the other flags ask for."""
    check_draft_tokens(args.draft_tokens)
    keep_compiled()
    return loaded(args, args.model)


def loaded(args: argparse.Namespace, source: str) -> Any:
    with progress_bar(f"loading {source}", args.quiet) as progress:
        return load(source, dtype=args.dtype, quantize=args.quantize, progress=progress)


def drafting(args: argparse.Namespace) -> dict[str, Any]:
    """What --draft asks for; the draft model is loaded as the model is."""
    if args.draft is None:
        return {}
    draft = "lookup" if args.draft == "lookup" else loaded(args, args.draft)
    return {"draft": draft, "draft_tokens": args.draft_tokens}


def messages_of(system: str | None, *user: str) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": "user", "content": text} for text in user]


def chat_prompt(model: Any, messages: list[dict[str, str]]) -> list[int] | str:
    """The messages through the model's template; without one, a single user text as it is."""
    if model.tokenizer is not None and model.tokenizer.chat_template is not None:
        return model.tokenizer.encode_chat(messages)
    if len(messages) > 1:
        raise RequestError(f"{model.name} has no chat template, which --system needs")
    return messages[0]["content"]


def show(pieces: Iterator[str]) -> str:
    """Print pieces as they come; -> the whole text."""
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print(flush=True)
    return text


def ask() -> str:
    """One line from the user; empty at the end of input."""
    print("> ", end="", file=sys.stderr, flush=True)
    return read_stdin(sys.stdin.readline).strip()


def read_stdin(read: Callable[[], str]) -> str:
    """What `read` gives; refused if it is no text. Where the locale knows ASCII only, UTF-8 is read."""
    if isinstance(sys.stdin, io.TextIOWrapper) and codecs.lookup(sys.stdin.encoding).name == "ascii":
        sys.stdin.reconfigure(encoding="utf-8")
    try:
        return read()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin holds bytes that are not {error.encoding} text: {error.reason}") from None


def print_json(value: Any) -> None:
    """One object on one line, with escapes only where the output's encoding needs them."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(value)
    print(text)


def keep_compiled() -> None:
    """Keep compiled programs between runs, in JAX's persistent cache, unless the user has one or it cannot be."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        folder = os.path.join(base, "jaxlm", "compiled")
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextmanager
def progress_bar(label: str, quiet: bool) -> Iterator[Callable[..., None] | None]:
    """A bar on stderr that takes (bytes done, bytes in all); nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total, *_: bar.update(task, completed=done, total=total)
