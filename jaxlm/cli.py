"""The command line: text to stdout, everything else to stderr; bad input is one line and exit code 2."""

import argparse
import codecs
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from jaxlm.checkpoints import DEFAULT
from jaxlm.errors import JaxlmError, RequestError
from jaxlm.load import convert, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 not verified or failed, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    # A terminal that cannot show a character must not end the answer.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = args.run(args)
        print(end="", flush=True)
        return code or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has left, as `head` does. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (JaxlmError, OSError) as error:
        if args.debug:
            raise
        return complain("error", error, 2)
    except Exception as error:
        if args.debug:
            raise
        return complain(f"internal error (--debug shows where): {type(error).__name__}", error, 1)


def complain(kind: str, error: Exception, code: int) -> int:
    """One line on stderr; -> the exit code."""
    print(f"jaxlm: {kind}: {' '.join(str(error).split())}", file=sys.stderr)
    return code


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line; --help has the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; see: {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    common = OneLineParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    common.add_argument("--quiet", action="store_true", help="no progress on stderr")
    top = OneLineParser(
        prog="jaxlm", description="Run open-weight language models in JAX.",
        epilog="MODEL and SOURCE: a Hugging Face folder, a .gguf file, a jaxlm checkpoint, a known name or a hub id.",
    )  # fmt: skip
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, parents=[common])
        sub.set_defaults(run=run)
        return sub

    sub = command("generate", run_generate, "Answer a prompt, streaming to stdout.")
    add_model_flags(sub)
    add_sampling_flags(sub)
    sub.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    sub.add_argument("prompt", metavar="PROMPT", help='the prompt; "-" reads it from stdin')

    sub = command("chat", run_chat, "Talk to a model; an empty line or Ctrl-D ends.")
    add_model_flags(sub)
    add_sampling_flags(sub)

    sub = command("convert", run_convert, "Convert a checkpoint to a jaxlm checkpoint.")
    sub.add_argument("source", metavar="SOURCE")
    sub.add_argument("dest", metavar="DEST", help="the folder to make")
    sub.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the source")
    sub.add_argument("--force", action="store_true", help="replace DEST if it holds something")

    sub = command("export", run_export, "Write a folder that transformers loads.")
    sub.add_argument("source", metavar="SOURCE")
    sub.add_argument("dest", metavar="DEST", help="the folder to make")
    sub.add_argument("--format", choices=("hf",), default="hf", help="hf: config.json and safetensors")
    sub.add_argument("--force", action="store_true", help="replace DEST if it holds something")

    sub = command("verify", run_verify, "Compare a checkpoint's numbers with transformers, or with a golden file.")
    sub.add_argument("source", metavar="SOURCE")
    sub.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the file")
    sub.add_argument("--golden", type=Path, metavar="FILE", help="compare with this file instead of transformers")
    sub.add_argument("--save-golden", type=Path, metavar="FILE", help="keep the reference's numbers for later")
    sub.add_argument("--tolerance", type=float, metavar="X", help="relative; default by dtype (float32: 1e-4)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("warmup", run_warmup, "Compile ahead what generation needs, and keep it for later starts.")
    add_model_flags(sub)
    sub.add_argument("--max-len", type=int, default=1024, metavar="N", help="prompt and answer; default: %(default)s")
    sub.add_argument("--batch", type=int, default=1, metavar="B", help="default: %(default)s")

    sub = command("info", run_info, "Show config, sizes and memory needed, without loading weights.")
    sub.add_argument("source", metavar="SOURCE")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    return top


def add_model_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", default=DEFAULT, metavar="MODEL", help="default: %(default)s")
    sub.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the file")
    kinds = ("int8", "int4", "fp8", "file")
    sub.add_argument("--quantize", choices=kinds, help="round weights, or keep a GGUF file's blocks")
    sub.add_argument("--system", metavar="TEXT", help="a system message before the prompt")


def add_sampling_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    sub.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens; 0 is off")
    sub.add_argument("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens that sum to P")
    sub.add_argument("--min-p", type=float, default=0.0, metavar="P", help="keep tokens of at least P times the best")
    sub.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="1 (default) is off")
    sub.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    return {name: getattr(args, name) for name in names}


def run_generate(args: argparse.Namespace) -> None:
    from jaxlm.generate import generate, stream

    if args.raw and args.system:
        raise RequestError("--system needs the chat template, which --raw leaves out; allowed: one of them")
    text = read_stdin(sys.stdin.read) if args.prompt == "-" else args.prompt
    model = load_model(args)
    prompt: Any = text if args.raw else chat_prompt(model, messages_of(args.system, text))
    if args.json:
        answer = generate(model, [prompt], **sampling(args))[0]
        print_json(asdict(answer))
        return
    show(stream(model, prompt, **sampling(args)))


def run_chat(args: argparse.Namespace) -> None:
    from jaxlm.generate import stream

    model = load_model(args)
    messages = messages_of(args.system)
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        raise RequestError(f"{args.model} has no chat template; use: jaxlm generate --raw")
    while line := ask():
        messages.append({"role": "user", "content": line})
        answer = show(stream(model, chat_prompt(model, messages), **sampling(args)))
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
    warmup(model, batch=args.batch, max_len=args.max_len, say=lambda line: print(line, file=sys.stderr))


def run_info(args: argparse.Namespace) -> None:
    from jaxlm.info import describe, render

    facts = describe(args.source)
    if args.json:
        print_json(facts)
    else:
        print(render(facts))


def load_model(args: argparse.Namespace) -> Any:
    keep_compiled()
    with progress_bar(f"loading {args.model}", args.quiet) as progress:
        return load(args.model, dtype=args.dtype, quantize=args.quantize, progress=progress)


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


if __name__ == "__main__":
    sys.exit(main())
