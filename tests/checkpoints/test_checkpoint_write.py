"""Writing: strict about tensors, careful with the destination, safe to kill, and able to go on afterwards."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from jaxlm import checkpoints
from jaxlm.checkpoints import layout, workspace, write
from jaxlm.errors import CheckpointError

CONFIG = tiny.config(*[tiny.layer()] * 3)
PARTIAL = "c.jaxlm-partial"


def slices(config=CONFIG, seed=0):
    """Every tensor, layer by layer, as functions."""
    return list(write._slices(tiny.random_params(config, seed)))


def load(path: Path):
    return checkpoints.restore_params(checkpoints.read_checkpoint(path))


def is_model(path: Path, seed: int, config=CONFIG) -> bool:
    checkpoints.verify_checkpoint(path)
    return tiny.equal_trees(load(path), tiny.random_params(config, seed))


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "source" / "weights.bin"
    path.parent.mkdir()
    path.write_bytes(b"1")
    return path


def test_any_order_and_whole_leaves(tmp_path):
    params = tiny.random_params(CONFIG)
    whole = [(name, None, np.asarray(a)) for (name, _), a in zip(
        layout.model_leaves(CONFIG).items(), jax.tree.leaves(params), strict=True)]  # fmt: skip
    checkpoints.write_checkpoint(tmp_path / "a" / "b", CONFIG, whole)
    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices()[::-1])
    assert is_model(tmp_path / "a" / "b", 0)
    assert is_model(tmp_path / "c", 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "c"]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def change(name, layer, value):
    """The tensors with one replaced; value None drops it."""
    kept = [t for t in slices() if t[:2] != (name, layer)]
    return kept if value is None else [*kept, (name, layer, value)]


Q, SHAPE = "segments.0.0.attn.q", (4, 6, 8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (change(Q, 1, None), f"'{Q}' of layer 1 is missing, with 0 more"),
        (change("embed.table", None, None), "'embed.table' is missing, with 0 more"),
        (change("x", None, np.ones(3)), "'x' is not a parameter"),
        (change(Q, 3, np.ones(SHAPE, np.float32)), "layer 3 is out of range"),
        (change(Q, -1, np.ones(SHAPE, np.float32)), "layer -1 is out of range"),
        (change("embed.table", 0, np.ones((13, 8), np.float32)), "layer 0 is out of range"),
        ([*slices(), slices()[3]], "there twice"),
        (change(Q, 1, np.ones((4, 6, 9), np.float32)), r"float32 \[4, 6, 9\]; the config asks for float32 \[4, 6, 8\]"),
        (change(Q, 1, np.ones((6, 4, 8), np.float32)), r"float32 \[6, 4, 8\]"),
        (change(Q, 1, lambda: np.ones(SHAPE)), "float64"),
        (change(Q, None, np.ones((2, *SHAPE), np.float32)), "there twice"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named_and_leave_nothing(tmp_path, source, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.write_checkpoint(tmp_path / "c", CONFIG, tensors, source_paths=[source])
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["jaxlm.json", "model_config.json", "params/x", "../x", "/x", "a/../b", "", "a\0"])
def test_file_names_that_are_taken_or_leave_the_folder(tmp_path, name):
    with pytest.raises(CheckpointError, match="file"):
        checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(), tokenizer_files={name: b""})
    assert list(tmp_path.iterdir()) == []


def test_extra_that_json_cannot_hold(tmp_path):
    with pytest.raises(CheckpointError, match="JSON"):
        checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(), extra={"a": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_filled_destination_is_replaced_only_when_forced(tmp_path):
    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=1))
    with pytest.raises(CheckpointError, match="not empty"):
        checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=2))
    assert is_model(tmp_path / "c", 1)
    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=2), force=True)
    assert is_model(tmp_path / "c", 2)
    (tmp_path / "empty").mkdir()
    checkpoints.write_checkpoint(tmp_path / "empty", CONFIG, slices(seed=3))
    assert is_model(tmp_path / "empty", 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "empty"]


def test_the_old_checkpoint_stays_until_the_new_one_is_complete(tmp_path):
    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=1))

    def failing():
        yield from slices(seed=2)[:-1]
        assert is_model(tmp_path / "c", 1)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        checkpoints.write_checkpoint(tmp_path / "c", CONFIG, failing(), force=True)
    assert is_model(tmp_path / "c", 1)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_forcing_never_deletes_what_is_not_a_checkpoint(tmp_path):
    (tmp_path / "c" / "photos").mkdir(parents=True)
    (tmp_path / "c" / "photos" / "1").write_text("mine")
    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=1), force=True)
    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=2), force=True)
    assert is_model(tmp_path / "c", 2)
    assert (tmp_path / "c.jaxlm-old" / "photos" / "1").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_destinations_that_hold_the_source_are_refused(tmp_path, source):
    (tmp_path / "link").symlink_to(tmp_path / "source")
    for dest in ("source", "link", "source/../source", "."):
        for paths in ([source], [source.parent], [tmp_path / "link"]):
            with pytest.raises(CheckpointError, match="holds the source"):
                checkpoints.write_checkpoint(tmp_path / dest, CONFIG, slices(), source_paths=paths, force=True)
    with pytest.raises(CheckpointError, match="is a file"):
        checkpoints.write_checkpoint(source, CONFIG, slices(), force=True)
    with pytest.raises(CheckpointError, match="cannot be made"):
        checkpoints.write_checkpoint(source / "c", CONFIG, slices())
    assert source.read_bytes() == b"1"


def test_too_little_disk_space_is_found_before_writing(tmp_path, monkeypatch):
    need = checkpoints.plan_write(CONFIG).disk_bytes
    monkeypatch.setattr(write.shutil, "disk_usage", lambda _: type("U", (), {"free": need - 1}))
    with pytest.raises(CheckpointError, match=f"needs {need} more bytes of disk; {need - 1} are free"):
        checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices())
    assert list(tmp_path.iterdir()) == []


def test_the_plan_is_what_is_written(tmp_path):
    plan = checkpoints.plan_write(CONFIG)
    opened = checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices())
    assert plan.disk_bytes == sum(i.size for n, i in opened.files.items() if "/c." in n or n.endswith("/c"))
    assert plan.largest_tensor_bytes == 4 * np.prod(SHAPE)


def test_progress_counts_every_byte_once(tmp_path):
    seen = []
    opened = checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(), progress=lambda *a: seen.append(a))
    checkpoints.restore_params(opened, progress=lambda *a: seen.append(a))
    for part in (seen[: len(slices())], seen[len(slices()) :]):
        assert [done for done, _, _ in part] == sorted({done for done, _, _ in part})
        assert part[-1][:2] == (opened.nbytes, opened.nbytes)


class Counting:
    """The tensors as functions that count their calls; the one numbered `fail` raises."""

    def __init__(self, fail: int = -1, seed: int = 0, error: type[BaseException] = KeyboardInterrupt):
        self.calls, self.fail, self.seed, self.error = 0, fail, seed, error

    def __iter__(self):
        for name, layer, value in slices(seed=self.seed):
            yield name, layer, lambda value=value: self._make(value)

    def _make(self, value):
        if self.calls == self.fail:
            raise self.error
        self.calls += 1
        return value()


def interrupt(dest: Path, source: Path, after: int, **options) -> None:
    with contextlib.suppress(KeyboardInterrupt, CheckpointError):
        checkpoints.write_checkpoint(dest, CONFIG, Counting(after, **options), source_paths=[source])
    assert not dest.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_run_goes_on_where_it_was(tmp_path, source, error):
    count, dest = len(slices()), tmp_path / "c"
    interrupt(dest, source, 10, error=error)
    with pytest.raises(CheckpointError, match="interrupted conversion lies at"):
        checkpoints.read_checkpoint(dest)
    for folder in (tmp_path / PARTIAL, tmp_path / PARTIAL / "checkpoint"):
        with pytest.raises(CheckpointError, match="is an interrupted conversion"):
            checkpoints.read_checkpoint(folder)
    rest = Counting()
    checkpoints.write_checkpoint(dest, CONFIG, rest, source_paths=[source])
    assert rest.calls == count - 10
    assert is_model(dest, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "source"]


def test_a_changed_source_config_or_file_starts_afresh(tmp_path, source):
    count, dest = len(slices()), tmp_path / "c"
    interrupt(dest, source, 10)
    source.write_bytes(b"22")
    again = Counting(20, seed=1)
    with contextlib.suppress(KeyboardInterrupt):
        checkpoints.write_checkpoint(dest, CONFIG, again, source_paths=[source])
    assert again.calls == 20
    other = tiny.config(*[tiny.layer()] * 3, max_positions=7)
    last = Counting(seed=2)
    checkpoints.write_checkpoint(dest, other, last, source_paths=[source.parent])
    assert last.calls == count
    assert is_model(dest, 2, other)


def test_what_the_journal_claims_but_the_disk_has_not_is_written_again(tmp_path, source):
    dest = tmp_path / "c"
    interrupt(dest, source, 10)
    chunks = sorted((tmp_path / PARTIAL / "checkpoint").rglob("c.*"))
    chunks[0].unlink()
    chunks[1].write_bytes(b"")
    chunks[2].with_name("c.0.0.__lock").write_bytes(b"x")
    with (tmp_path / PARTIAL / "journal.jsonl").open("a") as journal:
        journal.write('{"slice": ["embed.ta')
    rest = Counting()
    checkpoints.write_checkpoint(dest, CONFIG, rest, source_paths=[source])
    assert rest.calls == len(slices()) - 8
    assert is_model(dest, 0)


def test_a_full_disk_is_one_clear_error_and_can_go_on(tmp_path, source):
    """A limit on the size of files stands in for a full disk."""
    code = KILLED.replace("time.sleep(60)", "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))")
    result = run(code, tmp_path / "c", source)
    assert "could not be written" in result.stderr.splitlines()[-1]
    rest = Counting()
    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, rest, source_paths=[source])
    assert rest.calls <= len(slices()) - 13
    assert is_model(tmp_path / "c", 0)


def test_without_a_known_source_nothing_is_resumed_or_left(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        checkpoints.write_checkpoint(tmp_path / "c", CONFIG, Counting(10))
    assert list(tmp_path.iterdir()) == []


def test_two_writers_do_not_mix(tmp_path, source):
    def nested():
        yield from slices()[:5]
        with pytest.raises(CheckpointError, match="another process is writing"):
            checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=1), source_paths=[source])
        yield from slices()[5:]

    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, nested(), source_paths=[source])
    assert is_model(tmp_path / "c", 0)


@pytest.mark.parametrize("step", [1, 2])
def test_a_replacement_that_died_between_its_two_renames(tmp_path, monkeypatch, step):
    """At each rename the process may die; nothing is lost, and the next run puts things right."""
    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=1))
    rename, calls = os.rename, []

    def dying(*args):
        calls.extend([args] * (tmp_path / "c" in args))
        if len(calls) >= step:
            raise SystemExit
        rename(*args)

    monkeypatch.setattr(workspace.os, "rename", dying)
    with pytest.raises(SystemExit):
        checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=2), force=True)
    monkeypatch.undo()
    if step == 2:
        with pytest.raises(CheckpointError, match="the replaced checkpoint lies at"):
            checkpoints.read_checkpoint(tmp_path / "c")
        with pytest.raises(CheckpointError, match="x"):
            checkpoints.write_checkpoint(tmp_path / "c", CONFIG, [("x", None, np.ones(1))])
    assert is_model(tmp_path / "c", 1)


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=1))
    rename = os.rename

    def failing(old, new):
        if Path(old).name == "checkpoint":
            raise OSError(18, "Invalid cross-device link")
        rename(old, new)

    monkeypatch.setattr(workspace.os, "rename", failing)
    with pytest.raises(CheckpointError, match=r"c: could not be written: .*cross-device"):
        checkpoints.write_checkpoint(tmp_path / "c", CONFIG, slices(seed=2), force=True)
    assert is_model(tmp_path / "c", 1)


KILLED = """
import sys, time
sys.path[:0] = sys.argv[3:]
import test_checkpoint_write as t
from jaxlm import checkpoints
def slow():
    for number, tensor in enumerate(t.slices()):
        yield tensor
        if number == 12:
            print("ready", flush=True)
            time.sleep(60)
checkpoints.write_checkpoint(sys.argv[1], t.CONFIG, slow(), source_paths=[sys.argv[2]], force=True)
"""


def command(code: str, dest: Path, source: Path) -> list[str]:
    paths = [str(Path(__file__).parent), str(Path(tiny.__file__).parent)]
    return [sys.executable, "-c", code, str(dest), str(source), *paths]


def run(code: str, dest: Path, source: Path) -> subprocess.CompletedProcess:
    return subprocess.run(command(code, dest, source), capture_output=True, text=True, timeout=120)


def test_sigkill_midway(tmp_path, source):
    """The destination keeps the old checkpoint; the partial one does not load; the next run takes up its work."""
    dest = tmp_path / "c"
    checkpoints.write_checkpoint(dest, CONFIG, slices(seed=5))
    with subprocess.Popen(command(KILLED, dest, source), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert is_model(dest, 5)
    with pytest.raises(CheckpointError, match="interrupted"):
        checkpoints.read_checkpoint(tmp_path / PARTIAL / "checkpoint")
    rest = Counting()
    checkpoints.write_checkpoint(dest, CONFIG, rest, source_paths=[source], force=True)
    assert rest.calls == len(slices()) - 13
    assert is_model(dest, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "source"]


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    """Arrays handed over are let go at once: at no time are more than two alive."""
    alive = 0
    most = 0

    class Tracked(np.ndarray):
        def __del__(self):
            nonlocal alive
            alive -= self.base is None

    def make(value):
        nonlocal alive, most
        array = np.ndarray.__new__(Tracked, value.shape, value.dtype)
        array[...] = value
        alive += 1
        most = max(most, alive)
        return array

    tensors = ((name, layer, lambda value=value: make(value())) for name, layer, value in slices())
    checkpoints.write_checkpoint(tmp_path / "c", CONFIG, tensors)
    assert most <= 2
    assert alive == 0
    assert is_model(tmp_path / "c", 0)
