"""The parent's side: systems in processes of their own, asked in turns, so that a busy moment hits all."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.systems import Settings

Answers = dict[str, list[dict[str, Any]]]  # Of each system, one answer per turn.


class BenchError(Exception):
    """What the user gave cannot be measured: one line, exit code 2."""


class Unmeasured(BenchError):
    """A system does not do this: for a peer said in the result, and no error."""


class Worker:
    """A system in its own process (benchmarks/worker.py)."""

    def __init__(self, name: str, settings: Settings, env: Mapping[str, str] | None = None):
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process.
        command = [sys.executable, "-m", "benchmarks.worker", name, json.dumps(settings._asdict())]
        start = time.perf_counter()
        # An own session: Ctrl-C reaches the parent alone, which ends its children.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, **(env or {})}, start_new_session=True,
        )  # fmt: skip
        try:
            self.facts = self._answer() | {"start_seconds": time.perf_counter() - start}
        except BaseException:
            self.close()
            raise

    def ask(self, op: str, **request: Any) -> Any:
        """The answer of one operation. Raises Unmeasured where the system has none, BenchError where it failed."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"op": op, **request}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self.name} ended with code {self._process.wait()}: {self._last_words()}")
        answer = json.loads(line)
        if "unable" in answer:
            raise Unmeasured(f"{self.name}: {answer['unable']}")
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer["ok"]

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]


class Bench:
    """The systems of one run, jaxlm first, and what is noted on the way."""

    def __init__(self, question: str, settings: Settings, peers: list[str], rounds: int):
        self.question, self.settings, self.peers, self.rounds = question, settings, peers, rounds
        self.workers: list[Worker] = []
        self.notes: list[str] = []
        self.ceilings: list[dict[str, Any]] = []
        self._prober: Worker | None = None

    def say(self, text: str) -> None:
        print(f"benchmarks: {text}", file=sys.stderr, flush=True)

    def open(self) -> None:
        """Start all systems; one that cannot take the model is noted and left out."""
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if load > cores / 4:
            self.note(f"the machine was busy before this run (load {load:.1f} on {cores} cores): figures are unsure")
        for name in ("jaxlm", *self.peers):
            self.say(f"{name} loads")
            try:
                self.workers.append(Worker(name, self.settings))
            except Unmeasured as reason:
                self.note(str(reason))

    def close(self) -> None:
        for worker in (*self.workers, *([self._prober] if self._prober else [])):
            worker.close()

    def probe(self) -> None:
        """Measure the ceilings once more, in a process of its own, or in jaxlm's where a device serves but one."""
        if self._prober is None:
            alone = self.jaxlm.facts["backend"] == "tpu"
            self._prober = self.jaxlm if alone else Worker("ceilings", self.settings)
        self.ceilings.append(self._prober.ask("ceilings"))

    @contextlib.contextmanager
    def fresh(self, name: str, env: Mapping[str, str] | None = None) -> Iterator[Worker]:
        """One system in a new process, for what happens only once in a process."""
        worker = Worker(name, self.settings, env)
        try:
            yield worker
        finally:
            worker.close()

    @property
    def jaxlm(self) -> Worker:
        return self.workers[0]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def turns(self, label: str, op: str, warm_up: bool = True, **request: Any) -> Answers:
        """Every system's answers, one per round, after one that does not count; the ceilings beside them."""
        answers: Answers = {}
        for worker in self.workers if warm_up else []:
            self.say(f"{label}: warm-up, {worker.name}")
            with self.noting(worker):
                worker.ask(op, **request)
                answers[worker.name] = []
        for turn in range(self.rounds):
            self.say(f"{label}: turn {turn + 1} of {self.rounds}, ceilings")
            self.probe()
            for worker in self.workers:
                if worker.name in answers or not warm_up:
                    self.say(f"{label}: turn {turn + 1} of {self.rounds}, {worker.name}")
                    with self.noting(worker):
                        answers.setdefault(worker.name, []).append(worker.ask(op, **request))
        return answers

    @contextlib.contextmanager
    def noting(self, worker: Worker) -> Iterator[None]:
        """A peer that cannot do it, or fails, is noted; for jaxlm it is an error."""
        try:
            yield
        except BenchError as failure:
            if worker is self.jaxlm:
                raise BenchError(str(failure)) from failure
            self.note(f"not measured: {failure}")

    def ceiling(self, name: str) -> float:
        """The best that the machine has shown in this run."""
        if not self.ceilings:
            self.probe()
        return max(c[name] for c in self.ceilings)


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}
