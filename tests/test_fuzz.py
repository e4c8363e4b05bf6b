"""Damaged files of every kind are refused with our own error or load as what they say: no crash, hang or huge memory.

    python tests/test_fuzz.py --count 10000      more cases; --first N for others, --only NAME for one kind of file

Cases run in a process of their own with little address space left, one after another. Each is made from its number
alone. When that process dies or says nothing for long, the case is a fault and the next process goes on after it.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

COUNT = int(os.environ.get("JAXLM_FUZZ_COUNT", "300"))
ROOM = 768 << 20  # Bytes of address space beyond what the warm process has.
GROWTH = 256 << 20  # Bytes of memory that a case may take for a moment.
PATIENCE = 60.0  # Seconds for a case; far more than any takes, for slow machines.
LONGEST_MESSAGE = 3000
SELDOM = ("-config", "-weights", "journal")  # Targets that take one turn where others take four.


def work(first: int, count: int, only: str) -> None:
    """The child: run cases, one line of JSON before and after each."""
    from fuzz_targets import targets

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Libraries complain about what they are given.
    os.dup2(2, 1)
    chosen = {name: target for name, target in targets().items() if name.startswith(only)}
    turns = [name for name in chosen for _ in range(1 if name.endswith(SELDOM) else 4)]
    with tempfile.TemporaryDirectory(prefix="jaxlm-fuzz-") as folder:
        whole = {name: Whole(target, Path(folder), name) for name, target in chosen.items()}
        limit = used("VmSize") + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for number in range(first, first + count):
            name = turns[number % len(turns)]
            print(json.dumps({"case": number, "target": name}), file=answers)
            print(json.dumps(run_case(number, whole[name])), file=answers)


class Whole:
    """A target's undamaged files, their model and their tensors as others read them."""

    def __init__(self, target: Any, folder: Path, name: str) -> None:
        from fuzz_targets import read_files, remake

        self.target, self.name, self.folder = target, name, folder
        home = remake(folder / "whole" / name)
        self.place = target.make(home / "files")
        self.files = read_files(home / "files")
        self.relative = self.place.relative_to(home / "files")
        self.model = target.load(self.damaged(self.files))
        self.raw = self.tensors(self.damaged(self.files))

    def damaged(self, files: dict[str, bytes]) -> Path:
        """Write the files; -> what to load."""
        from fuzz_targets import remake, write_files

        home = remake(self.folder / "damaged" / self.name / "files")
        write_files(home, files)
        return home / self.relative

    def tensors(self, path: Path) -> Any:
        from fuzz_checks import check_tensors

        return check_tensors(path) if self.name not in ("checkpoint", "journal") else None


def run_case(number: int, whole: Whole) -> dict[str, Any]:
    """{"outcome": "refused", "loaded" or "fault", "detail": ...}."""
    from jaxlm.errors import JaxlmError

    path = whole.damaged(whole.target.damage(random.Random(f"{whole.name} {number}"), whole.files))
    forget_peak()
    before = used("VmRSS")
    try:
        check(whole, path)
    except JaxlmError as error:
        if len(str(error)) > LONGEST_MESSAGE:
            return {"outcome": "fault", "detail": f"a message of {len(str(error))} characters: {str(error)[:200]}"}
        return {"outcome": "refused", "detail": type(error).__name__}
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        place = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[:-6:-1])
        return {"outcome": "fault", "detail": f"{type(error).__name__}: {str(error)[:300]} ({place})"}
    finally:
        grown = used("VmHWM") - before
    if grown > GROWTH:
        return {"outcome": "fault", "detail": f"took {grown} bytes of memory"}
    return {"outcome": "loaded", "detail": ""}


def check(whole: Whole, path: Path) -> None:
    from fuzz_checks import check_model, check_same

    model = whole.target.load(path)
    check_model(model)
    if whole.tensors(path) == whole.raw:
        check_same(model, whole.model)


def used(what: str) -> int:
    """Bytes: VmRSS now, VmHWM at most, VmSize of address space."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def run(first: int, count: int, only: str = "") -> Iterator[dict[str, Any]]:
    """The outcome of every case, with its number and target; a dead or silent child is a fault."""
    end = first + count
    while first < end:
        for result in run_until_death(first, end - first, only):
            yield result
            first = result["case"] + 1


def run_until_death(first: int, count: int, only: str) -> Iterator[dict[str, Any]]:
    command = [sys.executable, __file__, "--work", str(first), str(count), only]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    lines: Queue[bytes | None] = Queue()

    def pump() -> None:
        assert child.stdout
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    case: dict[str, Any] = {}
    try:
        while True:
            line = lines.get(timeout=PATIENCE if case else 10 * PATIENCE)
            if line is None:
                code = child.wait()
                break
            heard = json.loads(line)
            if "outcome" in heard:
                yield case | heard
                case = {}
            else:
                case = heard
    except Empty:
        yield case | {"outcome": "fault", "detail": f"said nothing for {PATIENCE} seconds"}
        return
    finally:
        child.kill()
        child.wait()
    if case:
        yield case | {"outcome": "fault", "detail": f"the process died with {code}"}
    elif code:
        raise RuntimeError(f"the process could not start or end; exit code {code}")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is watched through Linux's /proc")
def test_damaged_files() -> None:
    """No case is a fault; many are refused, and some load."""
    outcomes: dict[str, Counter[str]] = {}
    faults = []
    for result in run(0, COUNT):
        outcomes.setdefault(result["target"], Counter())[result["outcome"]] += 1
        faults += [result] if result["outcome"] == "fault" else []
    assert not faults
    total = sum(outcomes.values(), Counter())
    assert total["refused"] > COUNT / 4 and total["loaded"] > COUNT / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", default="", help="the beginning of the targets' names")
    args = parser.parse_args()
    outcomes: dict[str, Counter[str]] = {}
    start = time.perf_counter()
    for result in run(args.first, args.count, args.only):
        outcomes.setdefault(result["target"], Counter())[result["outcome"]] += 1
        if result["outcome"] == "fault":
            print(f"case {result['case']} of {result['target']}: {result['detail']}", flush=True)
    for name, counts in outcomes.items():
        print(f"{name:22} {counts['refused']:6} refused {counts['loaded']:6} loaded {counts['fault']:6} faults")
    total = sum(outcomes.values(), Counter())
    print(f"{total.total()} cases in {time.perf_counter() - start:.0f} s: {dict(total)}")
    sys.exit(1 if total["fault"] else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        main()
