"""Memory and time of conversion and loading, on made-up Llama checkpoints: `python -m benchmarks.convert`.

A checkpoint of 600 MB is converted and loaded, to compare peak memory with the size of the files. A large one
(--gigabytes) is converted in a process whose address space is limited (RLIMIT_AS, what `ulimit -v` sets: it counts
libraries, stacks and buffers whether touched or not, so it is stricter than a limit on memory in use), killed in the
middle with SIGKILL, and converted again: the second run has to go on where the first stopped. Then every bit of the
result is compared with the source.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import machine
from benchmarks.turns import BenchError

SMALL = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
BLOCK = (16 << 20) + 1  # Random weights that tensors repeat from different places; odd, so that no two are alike.
KILL_AT = 0.4  # The share of the bytes that is written when the first run is killed.


def config_of(nbytes: float) -> dict[str, Any]:
    """A Llama with as many layers as come nearest to `nbytes` of bfloat16."""
    vocab, sizes = (32000, SMALL) if nbytes < 4e9 else (128256, LARGE)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "head_dim": 128,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_hidden_layers": 1, **sizes,
    }  # fmt: skip
    layer = sum(2 * np.prod(s) for name, s in shapes_of(config).items() if ".layers." in name)
    rest = 4 * vocab * sizes["hidden_size"]
    return config | {"num_hidden_layers": max(1, round((nbytes - rest) / layer))}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a published Llama."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    vocab = (config["vocab_size"], width)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocab, "model.norm.weight": (width,)}
    parts = {
        "self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, q), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner), "input_layernorm": (width,), "post_attention_layernorm": (width,),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in parts.items()}
    return shapes | {"lm_head.weight": vocab}


def make(folder: Path, config: dict[str, Any], shards: int) -> int:
    """Write the checkpoint, sharded; -> bytes of weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    block = np.random.default_rng(0).standard_normal(BLOCK, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    shapes = shapes_of(config)
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes.items()}
    total, files, weight_map = sum(sizes.values()), [list[str]() for _ in range(shards)], {}
    done = 0
    for name, size in sizes.items():
        number = min(shards - 1, done * shards // total)
        files[number].append(name)
        weight_map[name] = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        done += size
    for names in filter(None, files):
        _write_shard(folder / weight_map[names[0]], {n: shapes[n] for n in names}, block)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], block: np.ndarray) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left, start = end // 2, len(path.name) * end // 7 % BLOCK
        while left:
            part = block[start : start + left]
            file.write(part.data)
            left, start = left - len(part), 0


def run_child(task: str, source: Path, dest: Path, limit: int) -> dict[str, float]:
    """One task in a process of its own; -> its peak of memory and of address space, and its seconds."""
    start = time.perf_counter()
    child = start_child(task, source, dest, limit)
    try:
        output, _ = child.communicate()
    finally:
        child.kill()  # Nothing, unless this was interrupted.
        child.wait()
    if child.returncode:
        raise BenchError(f"{task} of {source} ended with {child.returncode}; its message is above")
    return json.loads(output.splitlines()[-1]) | {"seconds": time.perf_counter() - start}


def start_child(task: str, source: Path, dest: Path, limit: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.convert", "--child", task, str(source), str(dest), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def child(task: str, source: str, dest: str, limit: str) -> None:
    """What the process does: "start" imports and starts everything, "convert" is the command, "load" loads."""
    if int(limit):
        resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    import jax

    from jaxlm.cli import main as command
    from jaxlm.load import load

    jax.device_put(0).block_until_ready()
    if task == "convert" and (code := command(["convert", source, dest])):
        sys.exit(code)
    if task == "load":
        jax.block_until_ready(load(source).params)
    print(json.dumps(peaks("self")))


def peaks(process: int | str) -> dict[str, int]:
    """The most memory and address space that a running process has had, in bytes. Linux only."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {name: int(status[key].split()[0]) * 1024 for name, key in (("peak", "VmHWM"), ("address", "VmPeak"))}


def interrupt(source: Path, dest: Path, limit: int, total: int) -> dict[str, Any]:
    """Start a conversion and kill it when part is written; -> the share done, and when each finished file was made."""
    from jaxlm.checkpoints.manifest import JOURNAL, PARTIAL_SUFFIX

    partial = dest.with_name(dest.name + PARTIAL_SUFFIX)
    running = start_child("convert", source, dest, limit)
    while written(partial) < KILL_AT * total:
        if running.poll() is not None:
            raise BenchError("the conversion ended before it could be killed; its message is above")
        time.sleep(0.1)
    used = peaks(running.pid)
    running.send_signal(signal.SIGKILL)
    running.wait()
    lines = [line for line in (partial / JOURNAL).read_text().splitlines(keepends=True) if line.endswith("\n")]
    files = [name for line in lines[1:] for name in json.loads(line.split(" ", 1)[1])["files"]]  # After a checksum.
    times = {name: (partial / "checkpoint" / name).stat().st_mtime_ns for name in files}
    return used | {"share": written(partial) / total, "times": times, "dest_exists": dest.exists()}


def written(folder: Path) -> int:
    """Bytes in all files of a folder that another process is filling."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def compare(source: Path, dest: Path) -> int:
    """Compare every slice on disk with what the reader makes of the source; -> bytes compared."""
    import tensorstore as ts

    from jaxlm.conversion import layer_tensors, open_source

    compared = 0
    for name, layer, make_slice in layer_tensors(open_source(source)):
        path = str(dest / "params" / name) + "/"
        stored = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}, read=True).result()
        found, wanted = (stored if layer is None else stored[layer]).read().result(), make_slice()
        if not np.array_equal(found.view(np.uint16), wanted.view(np.uint16)):
            raise BenchError(f"{name}, layer {layer}, differs from the source")
        compared += found.nbytes
    return compared


def sync(folder: Path) -> None:
    """Wait until all files of a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextlib.contextmanager
def checkpoint(parent: Path | None, gigabytes: float, shards: int) -> Iterator[tuple[Path, Path, dict[str, Any]]]:
    """(source folder, destination, facts) in a temporary folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="jaxlm-convert-", dir=parent) as name:
        folder = Path(name)
        config = config_of(gigabytes * 1e9)
        needed = 2.1e9 * gigabytes
        if shutil.disk_usage(folder).free < needed:
            raise BenchError(f"needs {needed / 1e9:.0f} GB of disk in {folder.parent}; see --folder")
        start = time.perf_counter()
        total = make(folder / "source", config, shards)
        sizes = {name: 2 * int(np.prod(shape)) for name, shape in shapes_of(config).items()}
        stacked = config["num_hidden_layers"] * sizes["model.layers.0.mlp.up_proj.weight"]
        facts = {"bytes": total, "largest_tensor": max(sizes.values()), "largest_stack": stacked, "shards": shards}
        yield folder / "source", folder / "dest", facts | {"making_seconds": time.perf_counter() - start}


def small(args: argparse.Namespace) -> dict[str, Any]:
    """Convert and load 600 MB: peak memory beside 1.3 times the files plus one stacked tensor."""
    with checkpoint(args.folder, 0.6, 6) as (source, dest, facts):
        runs = {"start": run_child("start", source, dest, 0), "convert": run_child("convert", source, dest, 0)}
        runs["load source"] = run_child("load", source, dest, 0)
        runs["load checkpoint"] = run_child("load", dest, dest, 0)
        return facts | {"bound": 1.3 * facts["bytes"] + facts["largest_stack"], "runs": runs}


def large(args: argparse.Namespace) -> dict[str, Any]:
    """Convert under a limit, with a kill in between."""
    limit = int(args.limit_gigabytes * 1e9)
    with checkpoint(args.folder, args.gigabytes, max(2, round(args.gigabytes / 2))) as (source, dest, facts):
        start = time.perf_counter()
        first = interrupt(source, dest, limit, facts["bytes"])
        killed = {k: first[k] for k in ("peak", "address", "share")}
        killed |= {"seconds": time.perf_counter() - start, "files": len(first["times"])}
        second = run_child("convert", source, dest, limit)
        kept = sum((dest / name).stat().st_mtime_ns == made for name, made in first["times"].items())
        compared = compare(source, dest)
        good = not first["dest_exists"] and kept == killed["files"] > 0 and compared == facts["bytes"]
        checks = {"files_kept": kept, "bytes_compared": compared, "disk": written(dest), "good": good}
        return facts | {"limit": limit, "killed": killed, "resumed": second, **checks}


def show_small(result: dict[str, Any]) -> None:
    size, stack, start = result["bytes"], result["largest_stack"], result["runs"]["start"]["peak"]
    print(f"{size / 1e6:.0f} MB in {result['shards']} shards, largest stacked tensor {stack / 1e6:.0f} MB")
    print(f"bound: 1.3 x files + one stacked tensor = {result['bound'] / 1e6:.0f} MB")
    print(f"{'':16} {'peak MB':>8} {'less start':>11} {'/ files':>8} {'seconds':>8}")
    for name, run in result["runs"].items():
        net = run["peak"] - start
        print(f"{name:16} {run['peak'] / 1e6:8.0f} {net / 1e6:11.0f} {net / size:8.2f} {run['seconds']:8.1f}")


def show_large(result: dict[str, Any]) -> None:
    size, tensor, limit, disk, compared = (
        f"{result[k] / 1e9:.2f} GB" for k in ("bytes", "largest_tensor", "limit", "disk", "bytes_compared")
    )
    print(f"{size} in {result['shards']} shards, made in {result['making_seconds']:.0f} s; largest tensor {tensor}")
    print(f"address space limited to {limit}")
    for name in ("killed", "resumed"):
        run = result[name]
        peak, address = f"{run['peak'] / 1e9:.2f} GB", f"{run['address'] / 1e9:.2f} GB"
        print(f"{name:8} after {run['seconds']:4.0f} s, peak memory {peak}, peak address space {address}")
    share, files = f"{result['killed']['share']:.0%}", result["killed"]["files"]
    print(f"killed at {share} with {files} files finished, of which {result['files_kept']} were kept as they were")
    print(f"result: {disk} on disk, {compared} compared bit by bit: {'good' if result['good'] else 'NOT GOOD'}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=12.0, help="of the large one; 0 leaves it out")
    parser.add_argument("--limit-gigabytes", type=float, default=3.0, help="of address space; default %(default)s")
    parser.add_argument("--folder", type=Path, help="where to make temporary folders; needs twice the size")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine.description()}
    try:
        result["small"] = small(args)
        show_small(result["small"])
        if args.gigabytes:
            result["large"] = large(args)
            show_large(result["large"])
    except BenchError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(result))
    sys.exit(0 if result.get("large", {"good": True})["good"] else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
