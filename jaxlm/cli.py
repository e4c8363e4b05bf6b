"""The command line: text to stdout, everything else to stderr; bad input is one line and exit code 2."""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxlm.checkpoints import DEFAULT
from jaxlm.errors import JaxlmError
from jaxlm.generate import DRAFT_TOKENS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 not verified or failed, 2 bad input, 130 interrupted."""
    args = parser().parse_args(argv)
    # A terminal that cannot show a character must not end the answer.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = getattr(importlib.import_module("jaxlm.commands"), args.run)(args)
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

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, parents=[common])
        sub.set_defaults(run=f"run_{name}")
        return sub

    sub = command("generate", "Answer a prompt, streaming to stdout.")
    add_model_flags(sub)
    add_sampling_flags(sub)
    add_draft_flags(sub)
    sub.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    sub.add_argument("--json", action="store_true", help="print one JSON object instead of streaming text")
    sub.add_argument("prompt", metavar="PROMPT", help='the prompt; "-" reads it from stdin')

    sub = command("chat", "Talk to a model; an empty line or Ctrl-D ends.")
    add_model_flags(sub)
    add_sampling_flags(sub)
    add_draft_flags(sub)

    sub = command("convert", "Convert a checkpoint to a jaxlm checkpoint.")
    sub.add_argument("source", metavar="SOURCE")
    sub.add_argument("dest", metavar="DEST", help="the folder to make")
    sub.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the source")
    sub.add_argument("--force", action="store_true", help="replace DEST if it holds something")

    sub = command("export", "Write a folder that transformers loads.")
    sub.add_argument("source", metavar="SOURCE")
    sub.add_argument("dest", metavar="DEST", help="the folder to make")
    sub.add_argument("--format", choices=("hf",), default="hf", help="hf: config.json and safetensors")
    sub.add_argument("--force", action="store_true", help="replace DEST if it holds something")

    sub = command("verify", "Compare a checkpoint's numbers with transformers, or with a golden file.")
    sub.add_argument("source", metavar="SOURCE")
    sub.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: that of the file")
    sub.add_argument("--golden", type=Path, metavar="FILE", help="compare with this file instead of transformers")
    sub.add_argument("--save-golden", type=Path, metavar="FILE", help="keep the reference's numbers for later")
    sub.add_argument("--tolerance", type=float, metavar="X", help="relative; default by dtype (float32: 1e-4)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("warmup", "Compile ahead what generation needs, and keep it for later starts.")
    add_model_flags(sub)
    sub.add_argument("--max-len", type=int, default=1024, metavar="N", help="prompt and answer; default: %(default)s")
    sub.add_argument("--batch", type=int, default=1, metavar="B", help="default: %(default)s")
    add_draft_flags(sub)

    sub = command("info", "Show config, sizes and memory needed, without loading weights.")
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


def add_draft_flags(sub: argparse.ArgumentParser) -> None:
    text = "guess ahead, which changes the speed but no answer: by lookup in the text so far, or by a smaller model"
    sub.add_argument("--draft", metavar="lookup|MODEL", help=text)
    sub.add_argument("--draft-tokens", type=int, default=DRAFT_TOKENS, metavar="N", help="guesses a step")


if __name__ == "__main__":
    sys.exit(main())
