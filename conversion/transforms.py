"""How arrays in a published file become leaves of the parameter tree, and back, exactly.

A transform is a small frozen value with three methods. `params` are the declarations of the targets, one layer's worth:

    shapes(params)          the shapes that the sources must have
    decode(arrays, params)  the sources' arrays -> the targets' arrays
    encode(arrays, params)  the targets' arrays -> the sources' arrays: the inverse

Our leaves keep the published layout, outputs first, and only split the head axis off: q [H,h,D] is [H*h,D] in files.
That flattening is part of every transform here; the "flat" form of a leaf is the file's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxlm.params import Param

Arrays = Sequence[np.ndarray]
Params = Sequence[Param]
Shape = tuple[int, ...]


class Transform(Protocol):
    """What a row of a family's table may hold."""

    def shapes(self, params: Params) -> list[Shape]: ...

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]: ...

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]: ...


def flat_shape(param: Param) -> Shape:
    """The shape with every head_dim axis merged into the head axis before it."""
    shape: list[int] = []
    for size, axis in zip(param.shape, param.axes, strict=True):
        if axis == "head_dim" and shape:
            shape[-1] *= size
        else:
            shape.append(size)
    return tuple(shape)


@dataclass(frozen=True)
class Same:
    """One source, one target, the same numbers in the same order."""

    def shapes(self, params: Params) -> list[Shape]:
        return [flat_shape(p) for p in params]

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return [a.reshape(p.shape) for a, p in zip(arrays, params, strict=True)]

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return [a.reshape(flat_shape(p)) for a, p in zip(arrays, params, strict=True)]


@dataclass(frozen=True)
class Scalar:
    """The leaf is one number [1], stored without an axis."""

    def shapes(self, params: Params) -> list[Shape]:
        return [() for _ in params]

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return [a.reshape(p.shape) for a, p in zip(arrays, params, strict=True)]

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return [a.reshape(()) for a in arrays]


@dataclass(frozen=True)
class Transposed:
    """Matrices stored inputs first: the last two axes of the flat form are swapped (Conv1D, fused experts)."""

    def shapes(self, params: Params) -> list[Shape]:
        return [_swapped(flat_shape(p)) for p in params]

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return [np.swapaxes(a, -1, -2).reshape(p.shape) for a, p in zip(arrays, params, strict=True)]

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return [np.swapaxes(a.reshape(flat_shape(p)), -1, -2) for a, p in zip(arrays, params, strict=True)]


def _swapped(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


@dataclass(frozen=True)
class Fused:
    """One source that holds several targets one after another along `axis` (fused qkv, gate_up).

    interleaved: their entries alternate instead (gate, up, gate, up ...). part is the form that each has within.
    """

    axis: int = 0
    interleaved: bool = False
    part: Transform = Same()

    def shapes(self, params: Params) -> list[Shape]:
        parts = [list(self.part.shapes([p])[0]) for p in params]
        total = sum(shape[self.axis] for shape in parts)
        parts[0][self.axis] = total
        return [tuple(parts[0])]

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        whole = np.moveaxis(arrays[0], self.axis, 0)
        if self.interleaved:
            parts = [whole[i :: len(params)] for i in range(len(params))]
        else:
            sizes = [self.part.shapes([p])[0][self.axis] for p in params]
            parts = np.split(whole, np.cumsum(sizes)[:-1].tolist())
        parts = [np.moveaxis(part, 0, self.axis) for part in parts]
        return [self.part.decode([a], [p])[0] for a, p in zip(parts, params, strict=True)]

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        parts = [np.moveaxis(self.part.encode([a], [p])[0], self.axis, 0) for a, p in zip(arrays, params, strict=True)]
        joined = np.stack(parts, axis=1) if self.interleaved else np.concatenate(parts)
        whole = joined.reshape(-1, *parts[0].shape[1:])
        return [np.moveaxis(whole, 0, self.axis)]


@dataclass(frozen=True)
class GroupedQKV:
    """One source that holds, per key/value head, its query heads, then its key, then its value, each of h rows.

    Targets q [H,h,...], k and v [K,h,...]; source [K*(G+2)*h, ...]. With G = 1 each head's own q, k and v lie together.
    """

    def shapes(self, params: Params) -> list[Shape]:
        q, k, v = (flat_shape(p) for p in params)
        return [(q[0] + k[0] + v[0], *q[1:])]

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        kv_heads, head_dim = params[1].shape[:2]
        packed = arrays[0].reshape(kv_heads, -1, head_dim, *arrays[0].shape[1:])
        parts = (packed[:, :-2], packed[:, -2:-1], packed[:, -1:])
        return [a.reshape(p.shape) for a, p in zip(parts, params, strict=True)]

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        kv_heads = params[1].shape[0]
        parts = [a.reshape(kv_heads, -1, *a.shape[1:]) for a in arrays]
        return [np.concatenate(parts, axis=1).reshape(self.shapes(params)[0])]


@dataclass(frozen=True)
class PairedRows:
    """Rows of each head stored so that lanes i and i + h/2 lie side by side, as GGUF keeps rotary weights of llama."""

    def shapes(self, params: Params) -> list[Shape]:
        return [flat_shape(p) for p in params]

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        result = []
        for array, param in zip(arrays, params, strict=True):
            heads, head_dim, *rest = param.shape
            pairs = array.reshape(heads, head_dim // 2, 2, *rest)
            result.append(np.swapaxes(pairs, 1, 2).reshape(param.shape))
        return result

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        result = []
        for array, param in zip(arrays, params, strict=True):
            heads, head_dim, *rest = param.shape
            halves = array.reshape(heads, 2, head_dim // 2, *rest)
            result.append(np.swapaxes(halves, 1, 2).reshape(flat_shape(param)))
        return result


@dataclass(frozen=True)
class Added:
    """The leaf is the source plus `by`: -1.0 for norm weights that a GGUF file stores as 1 + w.

    Computed in the stored dtype. 1 + (s - 1) gives back a stored s of at least 1/2, where the difference is exact.
    """

    by: float

    def shapes(self, params: Params) -> list[Shape]:
        return [flat_shape(p) for p in params]

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return [(a + a.dtype.type(self.by)).reshape(p.shape) for a, p in zip(arrays, params, strict=True)]

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return [(a - a.dtype.type(self.by)).reshape(flat_shape(p)) for a, p in zip(arrays, params, strict=True)]


@dataclass(frozen=True)
class FusedHeads:
    """One source that holds, head after head, that head's rows of each target.

    Targets [H,a,...] and [H,b,...]; source [H*(a+b),...].
    """

    def shapes(self, params: Params) -> list[Shape]:
        heads, _, *rest = params[0].shape
        return [(heads * sum(p.shape[1] for p in params), *rest)]

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        heads, _, *rest = params[0].shape
        ends = np.cumsum([p.shape[1] for p in params])[:-1].tolist()
        return np.split(arrays[0].reshape(heads, -1, *rest), ends, axis=1)

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return [np.concatenate(arrays, axis=1).reshape(self.shapes(params)[0])]


@dataclass(frozen=True)
class HeadsApart:
    """The leaf as it is kept, its head axis not merged with the next; transposed: with its last two axes swapped."""

    transposed: bool = False

    def shapes(self, params: Params) -> list[Shape]:
        return [_swapped(p.shape) if self.transposed else p.shape for p in params]

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return [np.swapaxes(a, -1, -2) if self.transposed else a for a in arrays]

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        return self.decode(arrays, params)
