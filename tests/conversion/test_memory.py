"""Loading holds the model and little else; progress tells how far it is; leaves and slices agree."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from foreign import llama_config, llama_folder, llama_shapes

from jaxlm.conversion import layer_tensors, load_params, load_source, open_source
from jaxlm.errors import CheckpointError

SCRIPT = """
import sys
import jax
from jaxlm.conversion import load_source, open_source
def peak():  # Of this program alone: getrusage would begin with that of the process that started it.
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
jax.device_put(0).block_until_ready()
open_source(sys.argv[1])
before = peak()
loaded = load_source(sys.argv[1], sys.argv[2] if sys.argv[2:] else None)
jax.block_until_ready(loaded.params)
print(peak() - before)
"""


def big_folder(folder: Path, layers: int = 6) -> tuple[int, int]:
    """A checkpoint of zeros in bfloat16, a sparse file; -> its size and that of its largest stacked leaf."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "vocab_size": 8192}
    config = llama_config(**sizes, head_dim=128)
    header, end = {}, 0
    for name, shape in llama_shapes(config).items():
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end, layers * 4096 * 1024 * 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(("dtype", "grows"), [(None, 1), ("float32", 2)])
def test_peak_memory(dtype: str | None, grows: int, tmp_path: Path) -> None:
    """At most 1.3 times what is loaded plus one stacked leaf."""
    size, leaf = big_folder(tmp_path / "big")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "big"), *([dtype] if dtype else [])]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = int(result.stdout)
    assert 0.9 * size * grows < peak < (1.3 * size + leaf) * grows


def test_progress_and_slices(tmp_path: Path) -> None:
    source = open_source(llama_folder(tmp_path / "m", "bfloat16", shards=2))
    seen: list[tuple[int, int]] = []
    loaded = load_source(tmp_path / "m", progress=lambda done, total: seen.append((done, total)))
    total = sum(t.nbytes for t in source.tensors.values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (total, total)
    leaves = {
        ".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(loaded.params)[0]
    }
    slices = [(name, layer, make()) for name, layer, make in layer_tensors(source)]
    assert {name for name, _, _ in slices} == leaves.keys()
    assert len(slices) == sum(len(a) if n.startswith("segments") else 1 for n, a in leaves.items())
    for name, layer, array in slices:
        np.testing.assert_array_equal(array, leaves[name] if layer is None else leaves[name][layer], err_msg=name)


def test_a_file_cut_after_opening_is_noticed(tmp_path: Path) -> None:

    source = open_source(llama_folder(tmp_path / "m"))
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is cut off"):
        load_params(source)
