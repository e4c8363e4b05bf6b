"""The benchmarks but for their timings: what the arithmetic says, what is reported, compared and refused."""

import functools
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

import jaxlm
from benchmarks import baseline, costs, machine, plot, programs, report, shapes
from benchmarks.__main__ import QUESTIONS, main, parser
from benchmarks.questions import Ratio, Result, Table, curves
from benchmarks.systems import Settings
from benchmarks.turns import Bench, BenchError, spread
from jaxlm import cpu
from jaxlm.config import AttentionSpec, FFNSpec, LatentAttentionSpec, LayerSpec, MoESpec, NormSpec, RopeSpec
from jaxlm.conversion import families
from jaxlm.conversion.family import described, translated
from jaxlm.conversion.fields import Fields
from jaxlm.params import abstract_params, declare
from jaxlm.quant import is_weight, quantize, widen
from jaxlm.visible import visible

ROOT = Path(__file__).parent.parent
QUICK = ("--model", "random:tiny", "--rounds", "1", "--prompt", "16", "--new", "4")
DENSE = tiny.config(tiny.layer(), tiny.layer(4))
TIED = tiny.config(tiny.layer(), tie_embeddings=True)
MOE = tiny.config(LayerSpec(AttentionSpec(4, 2, 6), MoESpec(64, 2, FFNSpec(10), shared=FFNSpec(3))))
LATENT = LatentAttentionSpec(4, 6, 4, 2, 5, RopeSpec(), NormSpec())
CONFIGS = {"dense": DENSE, "tied": TIED, "biases": tiny.BIASES, "mixture": MOE}


class TestBytes:
    """What a decode step reads, against sums written out by hand."""

    LAYER = 4 * (4 * 6 * 8 + 2 * 2 * 6 * 8 + 8 * 4 * 6 + 3 * 8 * 10 + 2 * 8)  # q, k and v, o, the FFN, two norms.

    def test_dense(self):
        table, norm, row = 4 * tiny.VOCAB * 8, 4 * 8, 4 * 8
        assert costs.weight_bytes(DENSE, abstract_params(DENSE), 1) == 2 * self.LAYER + table + norm + row
        assert costs.weight_bytes(DENSE, abstract_params(DENSE), 5) == 2 * self.LAYER + table + norm + 5 * row

    def test_a_tied_table_is_read_once(self):
        params = abstract_params(TIED)
        assert costs.weight_bytes(TIED, params, 7) == costs.nbytes(params) == self.LAYER + 4 * tiny.VOCAB * 8 + 4 * 8

    def test_an_unrolled_model_reads_the_same(self):
        params = tiny.random_params(DENSE)
        assert costs.weight_bytes(DENSE, jaxlm.unstack(params), 3) == costs.weight_bytes(DENSE, params, 3)

    def test_of_experts_only_the_chosen(self):
        params = abstract_params(MOE)
        expert = 4 * 3 * 8 * 10
        unread = costs.nbytes(params) + 4 * 8 - costs.weight_bytes(MOE, params, 1) - costs.nbytes(params["embed"])
        assert math.isclose(unread, 62 * expert)
        assert costs.experts_read(MOE.layers[0].ffn, 1) == 2
        assert costs.experts_read(MOE.layers[0].ffn, 2) == pytest.approx(2 + 2 * 62 / 64)
        assert costs.experts_read(MOE.layers[0].ffn, 10**6) == 64

    def test_a_mixture_beside_a_dense_layer(self):
        layer = LayerSpec(AttentionSpec(4, 2, 6), FFNSpec(10), beside=MoESpec(8, 2, FFNSpec(10)))
        config = tiny.config(layer, tie_embeddings=True)
        params = abstract_params(config)
        assert costs.nbytes(params) - costs.weight_bytes(config, params, 1) == 6 * 4 * 3 * 8 * 10

    def test_a_window_bounds_what_is_read_of_the_cache(self):
        one = 2 * 2 * 6  # Keys and values of two heads.
        assert costs.cache_bytes(DENSE, 3, 4) == 4 * one * (3 + 3)
        assert costs.cache_bytes(DENSE, 1000, 2) == 2 * one * (1000 + 4)
        assert costs.cache_bytes(tiny.config(LayerSpec(LATENT, FFNSpec(3))), 10, 2) == 2 * 10 * 8
        assert costs.step_bytes(TIED, abstract_params(TIED), 3, 10, 4) == (
            costs.weight_bytes(TIED, abstract_params(TIED), 3) + 3 * 4 * one * 10
        )

    @pytest.mark.parametrize(("kind", "bits"), [("int8", 8 + 16 / 32), ("int4", 4 + 2 * 16 / 32)])
    def test_quantised_weights_as_they_are_stored(self, kind, bits):
        config = shapes.llama(256, 64, 2, 2, 1, 128, tied=True).config
        leaves, structure = jax.tree.flatten(declare(config))
        zeros = [np.zeros(leaf.shape, np.float32) for leaf in leaves]
        kept = [a if p.init == "ones" else quantize(a, kind) for a, p in zip(zeros, leaves, strict=True)]
        params = structure.unflatten(kept)
        norms = sum(math.prod(leaf.shape) for leaf in leaves if leaf.init == "ones")
        matrices = sum(math.prod(leaf.shape) for leaf in leaves) - norms
        assert costs.weight_bytes(config, params, 1) == matrices * bits / 8 + 4 * norms


def product_flops(jaxpr) -> float:
    """FLOPs of every dot product of a traced function, those in functions that it calls too."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2.0 * inner * math.prod(eqn.outvars[0].aval.shape)
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        inner = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
        total += times * sum(product_flops(value) for value in inner if hasattr(value, "eqns"))
    return total


class TestFlops:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_products_are_those_of_the_traced_model(self, monkeypatch, name):
        monkeypatch.setattr(cpu, "kernels", lambda: None)  # Their products would not be seen,
        jax.clear_caches()  # nor that they are off now.
        config, count = CONFIGS[name], 16
        made = jax.make_jaxpr(jaxlm.forward, static_argnums=2)(
            abstract_params(config), jax.ShapeDtypeStruct((1, count), jnp.int32), config
        )
        model = costs.forward_flops(config, 0, count, count)
        # The traced model multiplies hidden pairs too, and mixes experts by one more product, 2 C D per token.
        specs = [layer.attention for layer in config.layers]
        masked = sum((count**2 - costs.pairs(spec, 0, count)) * costs.pair_flops(spec) for spec in specs)
        mixing = sum(2 * s.ffn.top_k * 8 * count for s in config.layers if isinstance(s.ffn, MoESpec))
        assert product_flops(made.jaxpr) == model + masked + mixing

    def test_latent_attention_by_hand(self):
        config = tiny.config(LayerSpec(LATENT, FFNSpec(3)))
        weights = 4 * 6 * 8 + 8 * 8 + 4 * 4 * 6 + 4 * 5 * 6 + 8 * 4 * 5 + 3 * 3 * 8  # q, down, k_up, v_up, o, the FFN.
        assert costs.forward_flops(config, 2, 2, 1) == 2 * 2 * weights + 2 * 4 * (6 + 5) * (3 + 4) + 2 * 8 * tiny.VOCAB

    def test_a_split_prompt_costs_the_same(self):
        whole = costs.forward_flops(DENSE, 0, 12, 1)
        assert costs.forward_flops(DENSE, 0, 5, 0) + costs.forward_flops(DENSE, 5, 7, 1) == whole

    def test_training_is_three_forward_passes(self):
        assert costs.train_flops(DENSE, 9) == 3 * costs.forward_flops(DENSE, 0, 9, 9)

    @given(st.integers(0, 9), st.integers(0, 9), st.sampled_from([{}, {"window": 3}, {"chunk": 4}]))
    def test_pairs_are_those_that_the_mask_shows(self, start, count, reach):
        spec = AttentionSpec(1, 1, 2, **reach)
        positions = np.arange(start + count)[None]
        seen = visible(positions[:, start:], positions, spec)
        assert costs.pairs(spec, start, count) == int(seen.sum())


class TestPrograms:
    """What XLA reports of the compiled loop: temporaries, aliases, constants."""

    @functools.cache  # noqa: B019 - compiled once for all tests here.
    def described(self, window=0, lengths=()):
        layers = (tiny.layer(window, head_dim=16, inner=1024),) * 4
        config = tiny.config(*layers, vocab_size=64, hidden_size=64, max_positions=4096)
        found = programs.describe(jaxlm.Model(config, abstract_params(config)), 1, 100, list(lengths))
        if not found["decode"]:
            pytest.skip("the backend does not report")
        return found

    def test_a_step_needs_less_than_a_layer_and_copies_no_cache(self):
        if cpu.kernels() is None and jax.default_backend() == "cpu":
            pytest.skip("without the kernels XLA copies a layer out of its stack")
        found = self.described()
        assert found["decode"]["temporary_bytes"] < found["layer_bytes"]

    def test_cache_and_state_are_updated_in_place(self):
        found = self.described()
        for name in ("prefill", "decode"):
            assert found[name]["aliased_bytes"] >= found["cache_bytes"], name

    def test_weights_are_arguments_and_no_constants(self):
        found = self.described()
        for name in ("prefill", "decode"):
            assert found[name]["largest_constant_bytes"] < 1024, name
        assert found["decode"]["argument_bytes"] >= found["weight_bytes"] + found["cache_bytes"]

    @pytest.mark.filterwarnings("ignore:.*large amount of constants")
    def test_a_captured_array_would_be_found(self):
        weight = np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32)
        captured = jax.jit(lambda x: x @ weight).lower(jax.ShapeDtypeStruct((1, 128), jnp.float32)).compile()
        assert programs.memory(captured)["largest_constant_bytes"] == weight.nbytes
        assert programs.memory(captured)["aliased_bytes"] == 0

    def test_a_window_keeps_memory_constant(self):
        found = self.described(32, (32, 512, 4096))["by_length"]
        assert len({one["cache_bytes"] for one in found}) == 1
        assert len({one["temporary_bytes"] for one in found}) == 1

    def test_without_a_window_the_cache_grows(self):
        small, large = self.described(0, (512, 1024))["by_length"]
        assert large["cache_bytes"] == 2 * small["cache_bytes"]


class TestShapes:
    def test_every_shape_is_refused_or_known_by_name(self):
        assert shapes.named("folder/model", "float32") is None
        assert shapes.named("random:8b", "bfloat16") == replace(
            shapes.SHAPES["llama-8b"], config=replace(shapes.SHAPES["llama-8b"].config, dtype="bfloat16")
        )
        with pytest.raises(jaxlm.JaxlmError, match="random:tiny"):
            shapes.named("random:nothing", "float32")

    def test_the_sizes_are_those_of_the_names(self):
        counts = {
            name: sum(math.prod(p.shape) for p in jax.tree.leaves(abstract_params(shape.config)))
            for name, shape in shapes.SHAPES.items()
        }
        assert counts["llama-8b"] == 8_030_261_248 and counts["llama-135m"] == 134_515_008
        assert counts["llama-1b"] == 1_235_814_400 and counts["gemma-270m"] == 268_098_176

    @pytest.mark.parametrize("name", [name for name, shape in shapes.SHAPES.items() if shape.family])
    def test_the_published_family_has_the_same_shape(self, name):
        shape = shapes.SHAPES[name]
        family = families.by_model_type(shape.family)
        again = translated(family, Fields(described(family, shape.config)))
        assert costs.nbytes(abstract_params(again)) == costs.nbytes(abstract_params(shape.config))
        assert [s.attention.reach for s in again.layers] == [s.attention.reach for s in shape.config.layers]

    @pytest.mark.parametrize(
        ("name", "kind"), [("tiny", None), ("tiny", "int8"), ("tiny", "fp8"), ("tiny-moe", "int4")]
    )
    def test_random_weights_are_as_initialised_ones(self, name, kind):
        config = replace(shapes.SHAPES[name].config, dtype="bfloat16")
        params = shapes.random_params(config, kind)
        plain = jaxlm.init_params(config, jax.random.key(0))
        pairs = zip(jax.tree.leaves(params, is_leaf=is_weight), jax.tree.leaves(plain), strict=True)
        for found, expected in pairs:
            wide = np.asarray(widen(found, jnp.float32))
            assert wide.shape == expected.shape and (is_weight(found) or found.dtype == expected.dtype)
            assert wide.std() == pytest.approx(float(expected.astype(jnp.float32).std()), rel=0.15)
            assert len(np.unique(wide[..., :1])) > 1 or wide.std() == 0
            if is_weight(found):
                stored = quantize(np.asarray(expected, np.float32), kind)
                assert [(a.shape, a.dtype) for a in stored] == [(a.shape, a.dtype) for a in found]

    def test_no_wide_copy_of_a_stack_is_made(self):
        shape = (16, 512, 512)
        drawn = shapes._floats.lower(shape, 0.02, jax.random.key(0, impl="rbg"), "bfloat16").compile()
        assert drawn.memory_analysis().temp_size_in_bytes < 4 * math.prod(shape) / 2

    def test_a_random_model_generates(self):
        model = shapes.random_model(shapes.SHAPES["tiny-windowed"], "int8", "random:tiny-windowed")
        assert len(jaxlm.generate(model, [[1, 2, 3]], max_new_tokens=4)[0].token_ids) == 4
        with pytest.raises(jaxlm.JaxlmError, match="'file'"):
            shapes.random_model(shapes.SHAPES["tiny"], "file", "random:tiny")


def test_every_probe_of_the_machine_measures_something():
    assert machine.numpy_bandwidth(0.01, 1 << 20) > 0
    rate, how = machine.device_bandwidth(0.01, 1 << 20)
    assert rate > 0 and how in ("a sum on the device", "a copy on the device")
    assert machine.product_rate("float32", 0.01, 64, 1) > 0 and machine.product_rate("bfloat16", 0.01, 64, 3) > 0


def test_the_fit_finds_a_straight_line():
    lengths = [64, 256, 1024, 4096]
    start, slope = curves.fit(lengths, [0.5 + 0.002 * n for n in lengths])
    assert start == pytest.approx(0.5) and slope == pytest.approx(0.002)
    assert curves.fit([10], [3.0]) == (3.0, 0.0)


class TestBaseline:
    RATIOS = {"MBU": {"value": 0.5, "better": "higher"}, "start": {"value": 2.0, "better": "lower"}}  # noqa: RUF012

    def verdicts(self, bounds):
        return dict(zip(bounds, baseline.verdicts(bounds, self.RATIOS), strict=True))

    def test_bounds_hold_or_do_not(self):
        found = self.verdicts({"MBU": {"least": 0.5}, "start": {"most": 2.0}})
        assert all(good and line.startswith("ok") for good, line in found.values())
        found = self.verdicts({"MBU": {"least": 0.51}, "start": {"most": 1.9}})
        assert found["MBU"][0] is False and found["MBU"][1].startswith("TOO LOW   MBU: 0.5")
        assert found["start"][0] is False and found["start"][1].startswith("TOO HIGH  start: 2")

    def test_nan_is_too_low(self):
        ((good, _),) = baseline.verdicts({"MBU": {"least": 0.1}}, {"MBU": {"value": math.nan, "better": "higher"}})
        assert not good

    def test_a_ratio_that_was_not_measured_is_passed_over_and_said(self):
        ((good, line),) = self.verdicts({"decode / torch": {"least": 1.0}}).values()
        assert good and "not in this run" in line

    def test_what_is_stored_holds_by_the_margin(self, tmp_path):
        path = tmp_path / "baseline.json"
        baseline.store(path, "decode a", self.RATIOS)
        baseline.store(path, "decode b", {"MBU": {"value": 1.0, "better": "higher"}})
        stored = baseline.read(path)
        assert stored["decode a"] == {"MBU": {"least": 0.425}, "start": {"most": 2.3}}
        assert set(stored) == {"decode a", "decode b"}
        with pytest.raises(BenchError, match=r"nothing for 'decode c'; it has 'decode a', 'decode b'"):
            baseline.select(stored, "decode c", path)

    @pytest.mark.parametrize(
        "text", ["{", "[]", '{"a": 1}', '{"a": {"b": 2}}', '{"a": {"b": {"about": 2}}}', '{"a": {"b": {"least": "x"}}}']
    )
    def test_a_bad_file_is_refused(self, tmp_path, text):
        path = tmp_path / "baseline.json"
        path.write_text(text)
        with pytest.raises(BenchError, match=r"baseline\.json"):
            baseline.read(path)

    def test_the_stored_one_is_readable_and_names_known_questions(self):
        stored = baseline.read(ROOT / "benchmarks" / "baseline.json")
        assert stored and {key.split()[0] for key in stored} <= set(QUESTIONS)


def summary() -> dict:
    """What a run might have found: a curve with a gap, and bars."""
    bench = Bench("batch", Settings("random:tiny", "float32", None, 8), [], 3)
    bench.ceilings = [{"read_bandwidth": b, "matmul_rate": 2e9, "read_bandwidth_by": "hand"} for b in (1e9, 3e9, 2e9)]
    bench.note("one thing")
    bench.note("one thing")
    curve = [{"system": "jaxlm", "x": x, "tok/s": spread([10.0 * x, 12.0 * x, 11.0 * x]), "MBU": 0.5} for x in (1, 8)]
    rows = [*curve, {"system": "limit", "x": 1, "tok/s": 20.0}, {"system": "limit", "x": 8, "tok/s": 90.0}]
    bars = [{"system": "jaxlm", "load s": spread([1.0, 2.0])}, {"system": "limit", "weights MB": 123456.0}]
    result = Result([Table("a curve", rows, "batch"), Table("bars", bars)], {"decode MBU": Ratio(0.5)})
    settings = {"model": "random:tiny", "dtype": "float32", "quantize": None}
    machine = {"device": "a device", "cores": 2, "backend": "cpu", "jax": "0"}
    return report.summary(bench, result, settings, machine)


def test_a_report_shows_spreads_ratios_and_notes():
    found = json.loads(json.dumps(summary()))
    text = "\n".join(report.lines(found))
    assert "read bandwidth 2 (1-3) GB/s, by hand" in text and "11.0 (10.0-12.0)" in text
    assert "decode MBU: 0.50" in text and text.count("one thing") == 1 and "123456" in text
    assert found["ceilings"]["read_bandwidth"] == {"median": 2e9, "least": 1e9, "most": 3e9}


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_written(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="the optional plots need matplotlib (the bench extra)")
    path = tmp_path / f"plot{suffix}"
    plot.check(path)
    plot.draw(summary(), path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<?xml" in start


class TestRefusals:
    """One line on stderr, exit code 2, and nothing started."""

    def refused(self, capsys, *argv) -> str:
        assert main([str(a) for a in argv]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and err.startswith("benchmarks: ")
        return err

    def test_missing_peer(self, capsys, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "llama-cpp is not installed" in self.refused(capsys, "decode", "--peer", "llama-cpp")

    def test_missing_matplotlib(self, capsys, monkeypatch, tmp_path):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert "jaxlm[bench]" in self.refused(capsys, "decode", "--plot", tmp_path / "a.png")

    def test_bad_plot_and_folder(self, capsys, tmp_path):
        assert "a.txt" in self.refused(capsys, "decode", "--plot", tmp_path / "a.txt")
        assert "is no folder" in self.refused(capsys, "decode", "--json", tmp_path / "none" / "a.json")

    def test_bad_baseline(self, capsys, tmp_path):
        assert "No such file" in self.refused(capsys, "decode", "--check", tmp_path / "none.json")
        (tmp_path / "b.json").write_text("{}")
        assert "nothing for 'decode random:x bfloat16 int4'" in self.refused(
            capsys, "decode", "--check", tmp_path / "b.json", "--model", "random:x", "--dtype", "bfloat16",
            "--quantize", "int4",
        )  # fmt: skip

    @pytest.mark.parametrize("flag", ["--rounds", "--new", "--batch", "--longest-prompt", "--gigabytes"])
    @pytest.mark.parametrize("value", ["0", "-1", "x"])
    def test_bad_numbers(self, flag, value):
        with pytest.raises(SystemExit) as ended:
            main(["decode", flag, value])
        assert ended.value.code == 2

    def test_bad_model(self):
        done = command("decode", "--model", "random:nothing")
        assert done.returncode == 2 and done.stdout == ""
        assert "random:tiny" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def environment() -> dict[str, str]:
    """One device, as outside the tests."""
    return os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def command(*argv: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "benchmarks", *argv]
    return subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def bench():
    """One process with a tiny model, for one turn of every question."""
    made = Bench("test", Settings("random:tiny", "float32", None, 64), [], 1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        made.open()
        yield made
    made.close()


def test_what_jaxlm_cannot_do_is_an_error(bench):
    with pytest.raises(BenchError, match="beyond the model's context of 65536"):
        bench.turns("too long", "prefill", batch=1, prompt=65536)
    with pytest.raises(BenchError, match="allowed: up to 256"):
        bench.turns("too many", "decode", batch=1, length=4, steps=257)


def test_what_a_peer_cannot_do_is_noted_and_left_out(bench):
    class Peer:
        name = "peer"

        def ask(self, op, **request):
            raise BenchError("peer: no compiler")

    made = Bench("test", bench.settings, [], 1)
    made.workers = [*bench.workers, Peer()]
    made.probe = bench.probe
    answers = made.turns("a try", "prefill", batch=1, prompt=4)
    assert list(answers) == ["jaxlm"] and made.notes == ["not measured: peer: no compiler"]


@pytest.mark.parametrize(
    ("question", "ratio", "options"),
    [
        ("prefill", "prefill MFU", []),
        ("batch", "batch measured / arithmetic", ["--batches", "1", "2"]),
        ("context", "context measured / arithmetic", ["--lengths", "32", "64"]),
        ("memory", "aliased / cache", ["--lengths", "64"]),
        ("compile", "warm start / (load + prefill)", []),
        ("train", "train MFU", []),  # Last: it gives the weights away.
    ],
)
def test_each_question_answers(bench, question, ratio, options):
    args = parser().parse_args([question, *QUICK, *options])
    found = QUESTIONS[question](bench, args)
    assert found.ratios[ratio].value > 0 and all(table.rows for table in found.tables)


def test_a_question_from_end_to_end(tmp_path):
    key, path = "speed random:tiny float32", tmp_path / "b.json"
    path.write_text(json.dumps({key: {"decode MBU": {"least": 1e9}, "prefill MFU": {"least": 0}}}))
    done = command("speed", *QUICK, "--json", f"{tmp_path}/a.json", "--check", str(path), "--store", str(path))
    assert done.returncode == 1, done.stderr
    assert "TOO LOW   decode MBU" in done.stdout and "ok        prefill MFU" in done.stdout
    found = json.loads((tmp_path / "a.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert {row["system"] for row in found["tables"][0]["rows"]} == {"jaxlm", "limit"}
    assert found["ratios"]["decode MBU"]["value"] > 0 and found["ceilings"]["read_bandwidth"]["least"] > 0
    assert "turn 1 of 1, jaxlm" in done.stderr and "Traceback" not in done.stderr
    assert baseline.read(path)[key]["decode MBU"]["least"] < found["ratios"]["decode MBU"]["value"]


def test_an_interrupt_ends_the_children():
    # What runs the tests may ignore the signal, and a child would take that over.
    heeding = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = heeding + "runpy.run_module('benchmarks', run_name='__main__', alter_sys=True)"
    line = [sys.executable, "-c", code, "decode", *QUICK, "--rounds", "100000"]
    running = subprocess.Popen(line, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        interrupt(running)
    finally:
        running.terminate()


def interrupt(running: subprocess.Popen) -> None:
    assert running.stderr
    while "turn 1" not in (text := running.stderr.readline()):
        assert text, "it ended by itself"
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.send_signal(signal.SIGINT)
    rest = running.stderr.read()
    assert running.wait(30) == 130 and rest.endswith("benchmarks: interrupted\n") and "Traceback" not in rest
    assert children
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a child lives on"
        time.sleep(0.05)
