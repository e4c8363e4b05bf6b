"""One system under measurement, in a process of its own: requests come as JSON lines, answers go back the same way.

A process each keeps their peak memory apart, and lets the parent take turns between them while all stay loaded.
A request is {"op": name, ...}; an answer {"ok": result}, {"unable": reason} or {"error": one line}.
"""

import contextlib
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.systems import SYSTEMS, Settings, Unable


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """The answer to a request, whatever happens."""
    try:
        return {"ok": call()}
    except Unable as reason:
        return {"unable": str(reason)}
    except Exception as error:
        if os.environ.get("BENCHMARKS_DEBUG"):
            raise
        lines = str(error).strip().splitlines() or ["no message"]
        kind = "" if type(error).__module__ == "jaxlm.errors" else f"{type(error).__name__}: "
        return {"error": kind + lines[0]}


def open_system(name: str, settings: Settings) -> tuple[Any, dict[str, float]]:
    """The loaded system, and the seconds that its modules and then its weights took."""
    module_name, _, options = SYSTEMS[name]
    start = time.perf_counter()
    module = importlib.import_module(module_name)
    imported = time.perf_counter()
    system = module.System(settings, **options)
    return system, {"import_seconds": imported - start, "load_seconds": time.perf_counter() - imported}


def serve(name: str, settings: Settings) -> None:
    """Load, answer with the facts, then answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with contextlib.redirect_stdout(sys.stderr):
        system = None

        def begin() -> dict[str, Any]:
            nonlocal system
            system, seconds = open_system(name, settings)
            return system.facts() | seconds

        print(json.dumps(attempt(begin)), file=answers)
        for line in sys.stdin:
            request = json.loads(line)
            operation = getattr(system, request.pop("op"), None)
            if operation is None:
                print(json.dumps({"unable": "this is not measured for it"}), file=answers)
                continue
            print(json.dumps(attempt(functools.partial(operation, **request))), file=answers)


if __name__ == "__main__":
    serve(sys.argv[1], Settings(**json.loads(sys.argv[2])))
