"""Loading with quantised weights: rounded while they stream by, or the blocks of a GGUF file as they are stored.

No float copy of a whole leaf is ever made: a layer at a time is read, rounded, and put into the stacked node.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import gguf
import jax
import numpy as np

from jaxlm.checkpoints.arrays import aligned_empty
from jaxlm.config import ModelConfig
from jaxlm.conversion import plan
from jaxlm.conversion.load import config_for, layer_tensors
from jaxlm.conversion.plan import Step, leaves
from jaxlm.conversion.source import Source
from jaxlm.conversion.tensors import TensorInfo, read_raw
from jaxlm.errors import RequestError
from jaxlm.params import Param, Params, declare
from jaxlm.quant import GROUP, KINDS, Q4, Q8, for_backend, quantize

MATRICES = ("q", "k", "v", "o", "gate", "up", "down", "table")
Type = gguf.GGMLQuantizationType
KEPT = (Type.Q4_0, Type.Q4_1, Type.Q8_0)
Slice = tuple[str, int | None, Callable[[], Any]]


def load_quantised(
    source: Source, kind: str, dtype: str | None = None, progress: Callable[..., None] | None = None
) -> tuple[ModelConfig, Params]:
    """As `load_params`, with the large matrices as nodes of jaxlm.quant. Activations and the rest are of `dtype`.

    kind: "int8", "int4" or "fp8" rounds; "file" keeps the Q4_0, Q4_1 and Q8_0 blocks of a GGUF file bit by bit and
    rounds other block types to int8. Raises RequestError for another kind, or for "file" where the file has no blocks.
    """
    if kind not in (*KINDS, "file"):
        raise RequestError(f"quantize is {kind!r}; allowed: {', '.join(KINDS)}, file")
    if kind == "file" and not any(info.quantised for info in source.tensors.values()):
        raise RequestError(f"quantize is 'file', but {source.path} stores no blocks; allowed: {', '.join(KINDS)}")
    config = config_for(source, dtype)
    declared = {plan.dotted(path): param for path, param in leaves(config).items()}
    stacks: dict[str, Any] = {}
    done, total = 0, sum(math.prod(param.shape) for param in declared.values())
    for name, layer, make in _slices(source, kind, config, declared):
        node, shape = make(), declared[name].shape
        if layer is None:
            stacks[name] = node
        else:
            if name not in stacks:
                stacks[name] = jax.tree.map(functools.partial(_stack_like, shape[0]), node)
            jax.tree.map(functools.partial(_put, layer), stacks[name], node)
        done += math.prod(shape if layer is None else shape[1:])
        if progress:
            progress(done, total)
    ordered = iter([for_backend(jax.tree.map(jax.device_put, stacks.pop(name))) for name in declared])
    return config, jax.tree.map(lambda _: next(ordered), declare(config), is_leaf=lambda leaf: isinstance(leaf, Param))


def _stack_like(repeat: int, part: np.ndarray) -> np.ndarray:
    return aligned_empty((repeat, *part.shape), part.dtype)


def _put(layer: int, whole: np.ndarray, part: np.ndarray) -> None:
    whole[layer] = part


def _slices(source: Source, kind: str, config: ModelConfig, declared: dict[str, Param]) -> Iterator[Slice]:
    """One layer of a leaf after another, as a function that makes an array or a node of numpy arrays."""
    plain = layer_tensors(source, config.dtype)
    wide = layer_tensors(source, "float32")
    blocks = dict(_block_steps(source)) if kind == "file" else {}
    for (name, layer, make), (_, _, make_wide) in zip(plain, wide, strict=True):
        if (name, layer) in blocks:
            step = blocks[name, layer]
            yield name, layer, functools.partial(_stored, source.tensors[step.sources[0]], step)
        elif name.split(".")[-1] in MATRICES and declared[name].shape[-1] % GROUP == 0:
            yield name, layer, functools.partial(_rounded, make_wide, "int8" if kind == "file" else kind, name)
        else:
            yield name, layer, make


def _rounded(make: Callable[[], np.ndarray], kind: str, name: str) -> Any:
    return quantize(make(), kind, name=name)


def _block_steps(source: Source) -> Iterator[tuple[tuple[str, int | None], Step]]:
    """The slices that one tensor of kept blocks fills alone, by leaf and layer."""
    for (path, layer), group in itertools.groupby(source.plan, lambda s: (s.slots[0].path, s.slots[0].index[:1])):
        steps = list(group)
        single = len(steps) == 1 and len(steps[0].sources) == 1 and len(steps[0].slots) == 1
        if single and source.tensors[steps[0].sources[0]].quantised in KEPT:
            yield (plan.dotted(path), layer[0] if layer else None), steps[0]


def _stored(info: TensorInfo, step: Step) -> Q4 | Q8:
    """A tensor's blocks as a node: the same bits, the scales apart from the numbers (layouts: GGML's block_q4_0, _q4_1,
    _q8_0). The row's transform moves whole rows, so it serves every part."""
    assert info.quantised
    size = gguf.GGML_QUANT_SIZES[info.quantised][1]
    raw = read_raw(info).reshape(*info.shape[:-1], -1, size)
    param = step.slots[0].param

    def part(data: np.ndarray, dtype: Any, shrink: int) -> np.ndarray:
        array = np.ascontiguousarray(data).view(dtype)
        shape = (*param.shape[:-1], param.shape[-1] // shrink)
        flat = array.reshape(*info.shape[:-1], -1)
        return step.transform.decode([flat], [Param(shape, param.axes, param.init)])[0]

    scales = part(raw[..., :2], np.float16, GROUP)
    if info.quantised == Type.Q8_0:
        return Q8(part(raw[..., 2:], np.int8, 1), scales)
    if info.quantised == Type.Q4_1:
        return Q4(part(raw[..., 4:], np.uint8, 2), scales, part(raw[..., 2:4], np.float16, GROUP))
    return Q4(part(raw[..., 2:], np.uint8, 2), scales)
