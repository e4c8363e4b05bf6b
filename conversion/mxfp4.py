"""MXFP4 (OCP Microscaling Formats 1.0, 2023): blocks of 32 four-bit floats (E2M1) sharing a power of two (E8M0)."""

from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np

from jaxlm.conversion.transforms import Arrays, Params, Shape
from jaxlm.errors import CheckpointError, ConfigError

BLOCK = 32
MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


@dataclass(frozen=True)
class Mxfp4:
    """Experts' matrices from two sources of bytes: blocks [E,R,D/32,16] and scales [E,R,D/32].

    A byte holds two weights, the lower four bits first; a scale s is a factor of 2 ** (s - 127). Rows of two targets
    alternate. The weights are exact in bfloat16. Read only: a model is written with plain floats.
    """

    stored: ClassVar[tuple[str, ...]] = ("U8",)

    def shapes(self, params: Params) -> list[Shape]:
        experts, rows, width = params[0].shape
        if width % BLOCK:
            raise CheckpointError(f"MXFP4 weights with rows of {width}; allowed: multiples of {BLOCK}")
        scales = (experts, rows * len(params), width // BLOCK)
        return [(*scales, BLOCK // 2), scales]

    def decode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        blocks, scales = (a.reshape(s) for a, s in zip(arrays, self.shapes(params), strict=True))
        targets = [np.empty(p.shape, ml_dtypes.bfloat16) for p in params]
        for expert in range(len(blocks)):
            weights = unpack(blocks[expert], scales[expert])
            for i, target in enumerate(targets):
                target[expert] = weights[i :: len(targets)]
        return targets

    def encode(self, arrays: Arrays, params: Params) -> list[np.ndarray]:
        raise ConfigError("MXFP4 weights are read, not written")


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 [R,G,16] and [R,G] -> float32 [R,32*G]."""
    pairs = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], axis=-1)
    weights = np.ldexp(pairs.reshape(*scales.shape, BLOCK), scales[..., None].astype(np.int32) - 127)
    return weights.reshape(len(blocks), -1)
