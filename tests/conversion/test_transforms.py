"""Laws of the transforms, and what each means, written out index by index."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlm.conversion.transforms import Added, Fused, GroupedQKV, PairedRows, Same, Scalar, Transform, Transposed
from jaxlm.params import Param

Declared = list[Param]
sizes = st.integers(1, 4)


def head_matrix(heads: int, head_dim: int, width: int) -> Param:
    return Param((heads, head_dim, width), ("heads", "head_dim", "embed"), "ones")


def out_matrix(width: int, heads: int, head_dim: int) -> Param:
    return Param((width, heads, head_dim), ("embed", "heads", "head_dim"), "ones")


def qkv(kv: int, group: int, half: int, width: int) -> Declared:
    return [head_matrix(kv * group, 2 * half, width), *[head_matrix(kv, 2 * half, width)] * 2]


def gate_up(kv: int, group: int, half: int, width: int) -> Declared:
    return [Param((kv, group + 1, width), ("experts", "mlp", "embed"), "ones")] * 2


TABLE: dict[str, tuple[Transform, Callable[..., Declared]]] = {
    "same": (Same(), lambda k, g, c, d: [out_matrix(d, k, 2 * c)]),
    "scalar": (Scalar(), lambda k, g, c, d: [Param((1,), ("one",), "ones")]),
    "transposed": (Transposed(), lambda k, g, c, d: [head_matrix(k, 2 * c, d)]),
    "fused qkv": (Fused(), qkv),
    "fused qkv, inputs first": (Fused(axis=1, part=Transposed()), qkv),
    "fused experts": (Fused(axis=1), gate_up),
    "interleaved experts, inputs first": (Fused(axis=-1, interleaved=True, part=Transposed()), gate_up),
    "grouped qkv": (GroupedQKV(), qkv),
    "paired rows": (PairedRows(), lambda k, g, c, d: qkv(k, g, c, d)[:1]),
    "paired biases": (PairedRows(), lambda k, g, c, d: [Param((k, 2 * c), ("heads", "head_dim"), "zeros")]),
}


@pytest.mark.parametrize("name", TABLE)
@given(kv=sizes, group=sizes, half=sizes, width=sizes)
def test_encode_is_the_inverse_of_decode(name: str, kv: int, group: int, half: int, width: int) -> None:
    transform, declare = TABLE[name]
    params = declare(kv, group, half, width)
    sources = [np.arange(np.prod(s, dtype=int)).reshape(s) for s in transform.shapes(params)]
    targets = transform.decode(sources, params)
    assert [t.shape for t in targets] == [p.shape for p in params]
    assert sorted(np.concatenate([t.ravel() for t in targets])) == sorted(np.concatenate([s.ravel() for s in sources]))
    for again, source in zip(transform.encode(targets, params), sources, strict=True):
        np.testing.assert_array_equal(again, source)


def test_where_each_row_goes() -> None:
    """H 4, K 2, h 2, D 1: row r of the source holds the number r."""
    params = qkv(2, 2, 1, 1)
    rows = np.arange(16)[:, None]
    heads = {"grouped": GroupedQKV(), "fused": Fused()}
    found = {name: [t[..., 0].tolist() for t in how.decode([rows], params)] for name, how in heads.items()}
    assert found["fused"] == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11]], [[12, 13], [14, 15]]]
    assert found["grouped"] == [[[0, 1], [2, 3], [8, 9], [10, 11]], [[4, 5], [12, 13]], [[6, 7], [14, 15]]]


def test_paired_rows_by_definition() -> None:
    """Lane j of a head in halves lies at 2j, lane j + h/2 at 2j + 1."""
    (param,) = declared = [head_matrix(3, 6, 1)]
    (ours,) = PairedRows().decode([np.arange(18)[:, None]], declared)
    for head in range(3):
        for j in range(3):
            assert (ours[head, j, 0], ours[head, j + 3, 0]) == (6 * head + 2 * j, 6 * head + 2 * j + 1)
    assert ours.shape == param.shape


def test_interleaved_by_definition() -> None:
    params = [Param((3, 2), ("mlp", "embed"), "ones")] * 2
    gate, up = Fused(interleaved=True).decode([np.arange(12).reshape(6, 2)], params)
    np.testing.assert_array_equal((gate[:, 0], up[:, 0]), ([0, 4, 8], [2, 6, 10]))


@given(st.lists(st.floats(0.5, 1e6, width=32), min_size=1))
def test_added_restores_what_a_file_stores(values: list[float]) -> None:
    stored = np.array(values, np.float32)
    params = [Param(stored.shape, ("embed",), "ones")]
    (ours,) = Added(-1.0).decode([stored], params)
    np.testing.assert_array_equal(np.float32(1) + ours, stored)
    np.testing.assert_array_equal(Added(-1.0).encode([ours], params)[0], stored)
