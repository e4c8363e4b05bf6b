"""Fused attention against the plain formula: TPU kernels in interpret mode, the cuDNN formulation through XLA, lowering
for both, and the gradient of what has none."""

import dataclasses
import functools
import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

import jaxlm
from jaxlm import accelerator, cpu, gpu, quant, tpu
from jaxlm.attention import Past, Shared, attend_plainly
from jaxlm.cache import KV, slot_positions
from jaxlm.config import AttentionSpec, FFNSpec, LayerSpec, ModelConfig
from jaxlm.quant import Layer


@dataclasses.dataclass
class Call:
    """What the seam is given, with not-a-number in every slot that holds nothing."""

    q: jax.Array
    positions: jax.Array
    seen: Shared
    spec: AttentionSpec
    sinks: jax.Array | None

    def plain(self) -> np.ndarray:
        return wide(attend_plainly(self.spec, self.q, self.positions, self.seen, self.sinks))


def wide(a: jax.Array) -> np.ndarray:
    return np.asarray(a, np.float32)


def make_call(
    seed: int, spec: AttentionSpec, lengths: list[int], tokens: int, slots: int, dtype: str = "float32",
    latent: bool = False,
) -> Call:  # fmt: skip
    """Rows that have written `lengths` positions to a cache of `slots` (0: none), and go on by `tokens`."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    batch, heads = len(lengths), (spec.num_kv_heads, spec.head_dim)
    counts = jnp.asarray(lengths, jnp.int32)
    positions = counts[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None, :]
    new = KV(draw(batch, tokens, *heads), None if latent else draw(batch, tokens, *heads))
    held = slot_positions(counts, slots) if slots else None
    past = None
    if held is not None:
        empty = (held < 0)[None, :, :, None, None]
        stacks = [jnp.where(empty, jnp.nan, draw(2, batch, slots, *heads)) for _ in range(1 if latent else 2)]
        past = Past(KV(*(Layer(a, jnp.int32(1)) for a in stacks), *[None] * latent), held)
    sinks = draw(spec.num_heads).astype("float32") if spec.sinks else None
    return Call(draw(batch, tokens, spec.num_heads, spec.head_dim), positions, Shared(past, new), spec, sinks)


def close(found: jax.Array | None, expected: np.ndarray, dtype: str) -> None:
    """Equal up to a few roundings of the dtype."""
    assert found is not None and found.dtype == dtype
    np.testing.assert_allclose(wide(found), expected, atol=2e-5 if dtype == "float32" else 2e-2)


@pytest.fixture
def on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a TPU, with the kernels interpreted."""
    monkeypatch.setattr(accelerator, "backend", lambda: "tpu")
    monkeypatch.setattr(cpu, "kernels", lambda: None)
    for name in ("decode_attention", "prefill_attention"):
        monkeypatch.setattr(tpu, name, functools.partial(getattr(tpu, name), interpret=True))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H100, with XLA's attention in place of cuDNN's."""
    monkeypatch.setattr(accelerator, "backend", lambda: "gpu")
    monkeypatch.setattr(cpu, "kernels", lambda: None)
    monkeypatch.setattr(gpu, "capability", lambda: (9, 0))
    monkeypatch.setattr(gpu, "attention", functools.partial(gpu.attention, implementation="xla"))


@st.composite
def decodes(draw: st.DrawFn, **fixed: object) -> Call:
    """One new token over caches of few shapes: empty, part filled, full, wrapped."""
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    kv_heads, group, width = draw(st.sampled_from([(1, 3, 16), (2, 2, 8)]))
    slots = draw(st.sampled_from([5, 30]))
    reach = draw(st.sampled_from(["", "window", "chunk"]))
    options = {reach: draw(st.sampled_from([slots, slots + 9]))} if reach else {}
    options |= {"softcap": draw(st.sampled_from([0.0, 3.0])), "sinks": draw(st.booleans())} | fixed
    most = 3 * slots if options.get(reach) == slots else slots - 1
    lengths = draw(st.lists(st.integers(0, most), min_size=2, max_size=2))
    spec = AttentionSpec(kv_heads * group, kv_heads, width, scale=draw(st.sampled_from([None, 0.3])), **options)
    return make_call(draw(st.integers(0, 99)), spec, lengths, 1, slots, dtype)


@tiny.examples(10)
@given(call=decodes(), block=st.sampled_from([8, 16, 512]))
def test_the_decode_kernel_is_the_plain_formula(call: Call, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu, "BLOCK_COLUMNS", block * call.spec.num_kv_heads)
        stack, layer = accelerator.stack_of(call.seen.past.kv)
        new = jax.tree.map(lambda a: a[:, 0], call.seen.new)
        found = tpu.decode_attention(
            call.q[:, 0], new, stack, layer, call.positions[:, 0], call.spec, call.sinks, interpret=True
        )
    close(found[:, None], call.plain(), call.q.dtype.name)


def test_blocks_beyond_the_used_slots_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel fetches follows from its index map: the last used block stands for all later ones."""
    specs = []
    block_spec = tpu.pl.BlockSpec
    monkeypatch.setattr(tpu.pl, "BlockSpec", lambda *given: specs.append(given) or block_spec(*given))
    monkeypatch.setattr(tpu, "BLOCK_COLUMNS", 16)
    call = make_call(0, AttentionSpec(4, 2, 8), [0, 17], 1, 40)
    stack, layer = accelerator.stack_of(call.seen.past.kv)
    tpu.decode_attention(call.q[:, 0], jax.tree.map(lambda a: a[:, 0], call.seen.new), stack, layer,
                         call.positions[:, 0], call.spec, None, interpret=True)  # fmt: skip
    (shape, index), = {(shape, index) for shape, index in specs if len(shape) == 5}
    asked = [[int(index(b, j, np.array([1]), np.array([0, 17]), None)[2]) for j in range(5)] for b in range(2)]
    assert shape[2] == 8 and asked == [[0] * 5, [0, 1, 2, 2, 2]]


def test_a_latent_is_its_own_value(on_tpu: None) -> None:
    call = make_call(1, AttentionSpec(4, 1, 24), [0, 9], 1, 16, latent=True)
    close(accelerator.attention(call.q, call.positions, call.seen, call.spec, None), call.plain(), "float32")


PREFILLS = [
    ({}, [0, 0], 0),
    ({}, [128, 5], 128),
    ({"window": 20}, [0, 0], 0),
    ({"softcap": 3.0, "sinks": True}, [0, 60], 128),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("options", "lengths", "slots"), PREFILLS)
def test_splash_attention_is_the_plain_formula(
    on_tpu: None, options: dict, lengths: list, slots: int, dtype: str
) -> None:
    call = make_call(2, AttentionSpec(4, 2, 16, **options), lengths, 128, slots, dtype)
    close(accelerator.attention(call.q, call.positions, call.seen, call.spec, call.sinks), call.plain(), dtype)


@tiny.examples(10)
@given(call=decodes(softcap=0.0, sinks=False))
def test_one_token_for_cudnn_is_the_plain_formula(call: Call) -> None:
    past = accelerator.cut_past(call.seen.past)
    with jax.numpy_dtype_promotion("standard"):  # As JAX's own formula needs.
        found = gpu.attention(call.q, call.positions, call.seen.new, past, call.spec, implementation="xla")
    close(found, call.plain(), call.q.dtype.name)


@tiny.examples(6)
@given(st.sampled_from(["", "window", "chunk"]), st.lists(st.integers(0, 30), min_size=2, max_size=2), st.booleans())
def test_many_tokens_for_cudnn_are_the_plain_formula(reach: str, lengths: list[int], first: bool) -> None:
    spec = AttentionSpec(4, 2, 8, **({reach: 12} if reach else {}))
    call = make_call(3, spec, lengths, 7, 0 if first else 12 if reach else 31)
    past = accelerator.cut_past(call.seen.past)
    with jax.numpy_dtype_promotion("standard"):  # As JAX's own formula needs.
        found = gpu.attention(call.q, call.positions, call.seen.new, past, call.spec, implementation="xla")
    close(found, call.plain(), "float32")


SMALL = AttentionSpec(4, 2, 16)


@pytest.mark.parametrize(
    ("on", "dtype", "spec", "tokens", "slots", "expected"),
    [
        ("gpu", "bfloat16", SMALL, 5, 0, True),
        ("gpu", "float16", SMALL, 1, 8, True),
        ("gpu", "bfloat16", dataclasses.replace(SMALL, chunk=4), 5, 4, True),
        ("gpu", "float32", SMALL, 5, 0, False),
        ("gpu", "bfloat16", SMALL, 1, 0, False),
        ("gpu", "bfloat16", AttentionSpec(4, 2, 12, rope=None), 5, 0, False),
        ("gpu", "bfloat16", AttentionSpec(1, 1, 256), 5, 0, True),
        ("gpu", "bfloat16", AttentionSpec(1, 1, 264), 5, 0, False),
        ("gpu", "bfloat16", dataclasses.replace(SMALL, softcap=2.0), 5, 0, False),
        ("gpu", "bfloat16", dataclasses.replace(SMALL, sinks=True), 5, 0, False),
        ("gpu", "bfloat16", dataclasses.replace(SMALL, alibi=(0.1,) * 4), 5, 0, False),
        ("tpu", "bfloat16", SMALL, 1, 8, True),
        ("tpu", "float16", SMALL, 1, 8, False),
        ("tpu", "float32", dataclasses.replace(SMALL, alibi=(0.1,) * 4), 1, 8, False),
        ("tpu", "float32", SMALL, 128, 0, True),
        ("tpu", "float32", SMALL, 64, 0, False),
        ("tpu", "float32", SMALL, 128, 128, True),
        ("tpu", "float32", SMALL, 128, 64, False),
        ("tpu", "float32", dataclasses.replace(SMALL, window=128), 128, 128, False),
        ("tpu", "float32", dataclasses.replace(SMALL, chunk=128), 128, 0, False),
        ("", "bfloat16", SMALL, 5, 0, False),
    ],
)
def test_who_serves(
    on_gpu: None, on: str, dtype: str, spec: AttentionSpec, tokens: int, slots: int, expected: bool
) -> None:
    call = make_call(4, spec, [3], tokens, slots, dtype)
    assert accelerator.serves(on, call.q, call.seen, spec, call.sinks) is expected


@pytest.mark.parametrize("on", ["tpu", "gpu"])
def test_a_model_runs_through_the_seam(request: pytest.FixtureRequest, on: str) -> None:
    """A ragged prompt and steps past the window, layers left in their stacks; and a config traced without kernels."""
    monkeypatch = request.getfixturevalue("monkeypatch")
    layers = [LayerSpec(AttentionSpec(4, 2, 16, window=w), FFNSpec(32)) for w in (0, 4, 0, 4)]
    config = ModelConfig(64, 32, tuple(layers), dtype="float32" if on == "tpu" else "bfloat16")
    params, tokens = tiny.random_params(config, 1), tiny.random_tokens((2, 9), 1, 64)

    def run(config: ModelConfig) -> np.ndarray:
        cache = jaxlm.init_cache(config, 2, 12)
        logits, cache = jaxlm.prefill(params, tokens[:, :5], cache, config, np.array([5, 3]))
        seen = [logits]
        for i in range(5, 9):
            logits, cache = jaxlm.decode_step(params, tokens[:, i], cache, config)
            seen.append(logits)
        return np.asarray(jnp.stack(seen))

    plain = run(config)
    request.getfixturevalue(f"on_{on}")
    monkeypatch.setattr(quant, "LARGE", 200)  # The ring of the window has 256 numbers a layer, a norm 32.
    calls = []
    kernel = tpu if on == "tpu" else gpu
    name = "decode_attention" if on == "tpu" else "attention"
    run_kernel = getattr(kernel, name)
    monkeypatch.setattr(kernel, name, lambda *a: calls.append(a[0].shape[1] if on == "gpu" else 1) or run_kernel(*a))
    with jax.numpy_dtype_promotion("standard"):
        found = run(dataclasses.replace(config, max_positions=99))
    assert set(calls) == ({1} if on == "tpu" else {1, 5})
    np.testing.assert_allclose(found, plain, atol=(1e-4 if on == "tpu" else 5e-2) * np.abs(plain).max())


@pytest.mark.parametrize("on", ["gpu", "tpu"])
def test_the_first_slots_of_a_cache_are_not_taken_for_a_ring(on_gpu: None, on: str) -> None:
    call = make_call(7, SMALL, [4, 8], 1, 16, "bfloat16")
    assert accelerator.serves(on, call.q, call.seen, SMALL, None)
    part = call.seen._replace(past=call.seen.past._replace(positions=call.seen.past.positions[:, :8]))
    assert not accelerator.serves(on, call.q, part, SMALL, None)


def lowered(call: Call, platform: str) -> str:
    """The program of the seam's kernel for another platform than this machine's."""
    def run(q: jax.Array, positions: jax.Array, seen: Shared, sinks: jax.Array | None) -> jax.Array | None:
        return accelerator.attention(q, positions, seen, call.spec, sinks)

    traced = jax.jit(run).trace(call.q, call.positions, call.seen, call.sinks)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(("tokens", "slots"), [(1, 64), (5, 64), (5, 0)])
@pytest.mark.parametrize("options", [{}, {"window": 64}, {"chunk": 64}])
def test_it_lowers_to_cudnn(monkeypatch: pytest.MonkeyPatch, options: dict, tokens: int, slots: int) -> None:
    library = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(library, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(library, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(accelerator, "backend", lambda: "gpu")
    monkeypatch.setattr(gpu, "capability", lambda: (9, 0))
    call = make_call(5, AttentionSpec(4, 2, 64, **options), [3, 70 if options else 9], tokens, slots, "bfloat16")
    text = lowered(call, "cuda")
    masked = tokens > 1 and (slots or "chunk" in options)
    assert ("__cudnn$fmhaScaleBiasSoftmax" if masked else "__cudnn$fmhaSoftmax") in text
    kind = "PADDING" if tokens == 1 else "NO_MASK" if slots else "CAUSAL"
    assert f'mask_type\\22: \\22{kind}\\22' in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 256), (128, 128), (128, 0)])
def test_it_lowers_to_mosaic(monkeypatch: pytest.MonkeyPatch, tokens: int, slots: int, dtype: str) -> None:
    monkeypatch.setattr(accelerator, "backend", lambda: "tpu")
    call = make_call(6, AttentionSpec(8, 2, 128, softcap=9.0, sinks=True), [3, 9], tokens, slots, dtype)
    assert lowered(call, "tpu").count("tpu_custom_call") == (2 if tokens > 1 and slots else 1)


def test_a_switch_and_several_devices_leave_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.delenv("JAXLM_KERNELS", raising=False)
    assert accelerator.backend() == "tpu" and accelerator.stacked(1) and not accelerator.stacked(2)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert accelerator.backend() == ""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert accelerator.backend() == "gpu"
    monkeypatch.setenv("JAXLM_KERNELS", "0")
    assert accelerator.backend() == ""


def test_decode_steps_have_the_plain_gradient_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    module = cpu.kernels()
    if module is None:
        pytest.skip("jaxlm-cpu is not installed")
    spec = AttentionSpec(4, 2, 64, window=64, softcap=5.0, sinks=True)
    config = ModelConfig(64, 64, (LayerSpec(spec, FFNSpec(64)),))
    params = tiny.random_params(config, 1)
    cache = jaxlm.init_cache(config, 2, 64)  # Large enough to stay in its stack, where the kernel reads it.
    _, cache = jaxlm.prefill(params, tiny.random_tokens((2, 6), 1, 64), cache, config, np.array([6, 3]))

    def gradient(config: ModelConfig) -> list[np.ndarray]:
        loss = lambda p, c: jnp.sum(jnp.sin(jaxlm.decode_step(p, jnp.array([3, 5]), c, config)[0]))  # noqa: E731
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params, cache))]

    calls = []
    counted = lambda *a, **k: calls.append(1) or module.attention(*a, **k)  # noqa: E731
    monkeypatch.setattr(cpu, "kernels", lambda: SimpleNamespace(**{**vars(module), "attention": counted}))
    with_kernels = gradient(config)
    assert calls
    monkeypatch.setattr(cpu, "kernels", lambda: None)
    # Another config, for what was traced with kernels is kept by config.
    for found, expected in zip(with_kernels, gradient(dataclasses.replace(config, max_positions=99)), strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
