"""The parts of a layer, as frozen values: what each mechanism is told, and which values it accepts.

Every spec is hashable and static under `jit`. Out-of-range values raise ConfigError when the object is made.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxlm.errors import ConfigError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu")


def check(ok: bool, where: str, value: object, allowed: str) -> None:
    """Raise ConfigError unless ok."""
    if not ok:
        raise ConfigError(f"{where} is {value!r}; allowed: {allowed}")


def check_count(where: str, value: object, least: int = 1) -> None:
    """Raise ConfigError unless the value is an integer of at least `least`."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
    check(ok, where, value, f"an integer of at least {least}")


def check_number(where: str, value: object, above: float = 0.0) -> None:
    """Raise ConfigError unless the value is a finite number greater than `above`."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > above
    check(ok, where, value, f"a finite number above {above:g}")


def check_choice(where: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless the value is one of the names allowed."""
    check(value in allowed, where, value, ", ".join(allowed))


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm ("rms", Zhang & Sennrich 2019) or LayerNorm ("layer", Ba et al. 2016).

    scale, bias: whether the norm has such a weight. unit_offset: the stored weight w means a factor of 1 + w, applied
    in float32 before the result is narrowed.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    bias: bool = False
    scale: bool = True
    unit_offset: bool = False

    def __post_init__(self) -> None:
        check_choice("NormSpec.kind", self.kind, ("rms", "layer"))
        check_number("NormSpec.eps", self.eps, above=-1e-30)
        ok = self.scale or not (self.bias or self.unit_offset)
        check(ok, "NormSpec.scale", self.scale, "True where there is a bias or an offset")


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023)."""

    factor: float

    def __post_init__(self) -> None:
        check_number("LinearScaling.factor", self.factor)


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware scaling that grows theta with the row's length beyond the original context (bloc97 2023)."""

    factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        check_number("DynamicScaling.factor", self.factor)
        check_count("DynamicScaling.original_max_positions", self.original_max_positions)


@dataclass(frozen=True)
class Llama3Scaling:
    """The Llama 3.1 rule: low frequencies divided by `factor`, high ones kept, a ramp (or step) between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self) -> None:
        check_number("Llama3Scaling.factor", self.factor)
        check_number("Llama3Scaling.low_freq_factor", self.low_freq_factor)
        ok = self.high_freq_factor >= self.low_freq_factor
        check(ok, "Llama3Scaling.high_freq_factor", self.high_freq_factor, "a number of at least low_freq_factor")
        check_count("Llama3Scaling.original_max_positions", self.original_max_positions)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): a ramp between interpolated and kept frequencies, over lanes.

    attention_factor multiplies cos and sin. truncate: the ends of the ramp are rounded to whole lanes.
    """

    factor: float
    original_max_positions: int
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("factor", "attention_factor", "beta_fast", "beta_slow"):
            check_number(f"YarnScaling.{name}", getattr(self, name))
        check_count("YarnScaling.original_max_positions", self.original_max_positions)


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024): divisors per frequency, one set up to the original context and one beyond.

    Which set holds is decided by the row's whole length. attention_factor multiplies cos and sin.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_positions: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("short_factors", "long_factors"):
            for i, factor in enumerate(getattr(self, name)):
                check_number(f"LongRopeScaling.{name}[{i}]", factor)
        check_count("LongRopeScaling.original_max_positions", self.original_max_positions)
        check_number("LongRopeScaling.attention_factor", self.attention_factor)


@dataclass(frozen=True)
class FactorScaling:
    """Each frequency i divided by `factors[i]`, as files that store the divisors themselves do."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        for i, factor in enumerate(self.factors):
            check_number(f"FactorScaling.factors[{i}]", factor)


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | FactorScaling


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021).

    dims: how many leading lanes of a head are rotated, the rest passing through; 0 is all of them.
    interleaved: lane 2i is paired with lane 2i + 1; else lane i with lane i + dims/2.
    angles: how many of the pairs turn at all, the rest having frequency 0; 0 is all of them.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    dims: int = 0
    interleaved: bool = False
    angles: int = 0

    def __post_init__(self) -> None:
        check_number("RopeSpec.theta", self.theta)
        check_count("RopeSpec.dims", self.dims, least=0)
        check(self.dims % 2 == 0, "RopeSpec.dims", self.dims, "an even number")
        check_count("RopeSpec.angles", self.angles, least=0)

    def check_head(self, where: str, head_dim: int) -> None:
        """Raise ConfigError unless a head of this width can be rotated."""
        dims = self.dims or head_dim
        check(head_dim % 2 == 0 or self.dims > 0, where, head_dim, "an even number when rope is on")
        check(dims <= head_dim, "RopeSpec.dims", dims, f"up to the head width {head_dim}")
        check(self.angles <= dims // 2, "RopeSpec.angles", self.angles, f"up to {dims // 2}")
        for name in ("factors", "short_factors", "long_factors"):
            factors = getattr(self.scaling, name, None)
            if factors is not None:
                length = len(factors)
                check(length == dims // 2, f"{type(self.scaling).__name__}.{name} has length", length, f"{dims // 2}")


@dataclass(frozen=True)
class QueryScaling:
    """Queries grow with their position p: times 1 + beta * log(1 + floor((p + shift) / original)) (Llama 4 report)."""

    beta: float
    original: int
    shift: int = 0

    def __post_init__(self) -> None:
        check_number("QueryScaling.beta", self.beta)
        check_count("QueryScaling.original", self.original)
        check_count("QueryScaling.shift", self.shift, least=0)


@dataclass(frozen=True)
class AttentionSpec:
    """Causal self-attention. num_kv_heads = num_heads is MHA, 1 is MQA, between is GQA (Ainslie et al. 2023).

    rope None means no rotary positions. scale None means head_dim ** -0.5.
    window W > 0: a query sees itself and the W - 1 tokens before it. chunk C > 0: nothing of an earlier block of C.
    qk_norm normalises queries and keys: "head" each head alone with one shared weight, "heads" with a weight per head,
    "full" all heads together; before the rotation or after it. v_norm normalises each value head.
    softcap c > 0: scores become c * tanh(score / c) (Bello et al. 2016). clip c > 0: q, k and v are clipped to [-c, c].
    sinks: a learned score per head that takes part in the softmax and has no value (Xiao et al. 2023).
    alibi: a slope per head, whose product with the distance to the key is subtracted (Press et al. 2021); () is off.
    alibi_bfloat16: instead slope times the key's position, in bfloat16, is added before the scores are scaled.
    v_from_k: the projected keys, before norm and rotation, are the values too; there is no v weight.
    kv_keep: a label under which later layers find this layer's keys and values. kv_from: the label of the layer whose
    keys and values this one looks at, having none of its own, nor a cache (Brandon et al. 2024).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None = field(default_factory=RopeSpec)
    qkv_bias: bool = False
    out_bias: bool = False
    window: int = 0
    chunk: int = 0
    scale: float | None = None
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "heads", "full"] = "head"
    qk_norm_after_rope: bool = False
    v_norm: NormSpec | None = None
    query_scaling: QueryScaling | None = None
    softcap: float = 0.0
    clip: float = 0.0
    sinks: bool = False
    alibi: tuple[float, ...] = ()
    alibi_bfloat16: bool = False
    v_from_k: bool = False
    kv_keep: str = ""
    kv_from: str = ""

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_count(f"AttentionSpec.{name}", getattr(self, name))
        for name in ("window", "chunk"):
            check_count(f"AttentionSpec.{name}", getattr(self, name), least=0)
        for name in ("softcap", "clip"):
            check_number(f"AttentionSpec.{name}", getattr(self, name), above=-1e-30)
        ok = self.num_heads % self.num_kv_heads == 0
        check(ok, "AttentionSpec.num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}")
        check(not (self.window and self.chunk), "AttentionSpec.chunk", self.chunk, "0 where there is a window")
        check_choice("AttentionSpec.qk_norm_over", self.qk_norm_over, ("head", "heads", "full"))
        check(not (self.kv_keep and self.kv_from), "AttentionSpec.kv_keep", self.kv_keep, "'' where kv_from is set")
        ok = len(self.alibi) in (0, self.num_heads)
        check(ok, "AttentionSpec.alibi has length", len(self.alibi), f"0 or num_heads = {self.num_heads}")
        ok = bool(self.alibi) or not self.alibi_bfloat16
        check(ok, "AttentionSpec.alibi_bfloat16", self.alibi_bfloat16, "False unless there are alibi slopes")
        if self.rope:
            self.rope.check_head("AttentionSpec.head_dim", self.head_dim)
        if self.scale is not None:
            check_number("AttentionSpec.scale", self.scale)

    @property
    def softmax_scale(self) -> float:
        """What the scores q.k are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def stored(self) -> tuple[int, ...]:
        """What layers that share keys and values must agree in: shapes and which positions are kept."""
        return self.num_kv_heads, self.head_dim, self.window, self.chunk

    @property
    def reach(self) -> int:
        """How many positions, itself included, a query can see; 0 where there is no limit."""
        return self.window or self.chunk


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads come from one narrow latent.

    Per token the latent has kv_rank lanes and rope_dim further lanes carry the rotated key that all heads share. Each
    head scores nope_dim lanes made from the latent and the rope_dim lanes, and mixes value_dim lanes.
    q_rank 0: queries come straight from x; else through a latent of q_rank lanes, normalised.
    """

    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec
    norm: NormSpec
    q_rank: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    query_scaling: QueryScaling | None = None
    kv_keep: ClassVar[str] = ""
    kv_from: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_rank", "nope_dim", "rope_dim", "value_dim"):
            check_count(f"LatentAttentionSpec.{name}", getattr(self, name))
        check_count("LatentAttentionSpec.q_rank", self.q_rank, least=0)
        self.rope.check_head("LatentAttentionSpec.rope_dim", self.rope_dim)
        if self.scale is not None:
            check_number("LatentAttentionSpec.scale", self.scale)

    @property
    def softmax_scale(self) -> float:
        """What the scores q.k are multiplied by."""
        return (self.nope_dim + self.rope_dim) ** -0.5 if self.scale is None else self.scale

    @property
    def reach(self) -> int:
        """Latent attention has no window."""
        return 0


@dataclass(frozen=True)
class FFNSpec:
    """Gated: down(act(gate(x)) * (up(x) + up_offset)) (Shazeer 2020). Not gated: down(act(up(x))).

    clamp c > 0: the gate is cut off above c and the rest to [-c, c], before the activation.
    """

    intermediate_size: int
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"] = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float = 0.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        check_count("FFNSpec.intermediate_size", self.intermediate_size)
        check_choice("FFNSpec.activation", self.activation, ACTIVATIONS)
        check_number("FFNSpec.clamp", self.clamp, above=-1e-30)
        ok = math.isfinite(self.up_offset) and (self.gated or not self.up_offset)
        check(ok, "FFNSpec.up_offset", self.up_offset, "0 unless gated")


@dataclass(frozen=True)
class RouterSpec:
    """How a token's experts are chosen and weighted.

    scoring: softmax or sigmoid of the router's logits. correction: a learned bias that counts in the choice only.
    groups: experts come in that many groups, of which the best top_groups are considered; a group's score is its best
    expert's ("max") or the sum of its best two ("top2"). normalize: the chosen weights are divided by their sum.
    scale multiplies the weights. bias: the router's logits have one. expert_scale: a learned factor per expert.
    norm: the router sees its input normalised, times a learned scale, over sqrt(D).
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    expert_scale: bool = False
    norm: NormSpec | None = None

    def __post_init__(self) -> None:
        check_choice("RouterSpec.scoring", self.scoring, ("softmax", "sigmoid"))
        check_choice("RouterSpec.group_score", self.group_score, ("max", "top2"))
        check_number("RouterSpec.scale", self.scale)
        check_count("RouterSpec.groups", self.groups)
        ok = isinstance(self.top_groups, int) and 1 <= self.top_groups <= self.groups
        check(ok, "RouterSpec.top_groups", self.top_groups, f"an integer from 1 to groups = {self.groups}")


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts (Shazeer et al. 2017): each token is worked on by top_k of num_experts FFNs, and their sum.

    shared: an FFN that works on every token; with shared_gate, times the sigmoid of a learned score.
    scale_input: an expert's weight multiplies its input rather than its output.
    """

    num_experts: int
    top_k: int
    expert: FFNSpec
    router: RouterSpec = field(default_factory=RouterSpec)
    shared: FFNSpec | None = None
    shared_gate: bool = False
    scale_input: bool = False

    def __post_init__(self) -> None:
        check_count("MoESpec.num_experts", self.num_experts)
        ok = isinstance(self.top_k, int) and 1 <= self.top_k <= self.num_experts
        check(ok, "MoESpec.top_k", self.top_k, f"an integer from 1 to num_experts = {self.num_experts}")
        ok = self.num_experts % self.router.groups == 0
        check(ok, "RouterSpec.groups", self.router.groups, f"a divisor of num_experts = {self.num_experts}")
        most = self.num_experts // self.router.groups * self.router.top_groups
        check(self.top_k <= most, "MoESpec.top_k", self.top_k, f"up to {most}, the experts of the groups that are kept")
        ok = self.router.groups == 1 or self.router.group_score == "max" or self.num_experts >= 2 * self.router.groups
        check(ok, "RouterSpec.groups", self.router.groups, "groups of at least two experts, whose scores are added")
        check(self.shared is not None or not self.shared_gate, "MoESpec.shared_gate", self.shared_gate, "False")


@dataclass(frozen=True)
class LayerInput:
    """A vector per token made for each layer, which that layer feeds in after its FFN (Gemma 3n, 2025).

    The vector of layer l is (norm(W_l x / sqrt(D)) + sqrt(width) * table[id, l]) / sqrt(2) of the embedding x; `rows`
    is the table's length. The layer adds norm(out(act(gate(x)) * vector)).
    """

    width: int
    rows: int
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"] = "gelu_tanh"

    def __post_init__(self) -> None:
        check_count("LayerInput.width", self.width)
        check_count("LayerInput.rows", self.rows)
        check_choice("LayerInput.activation", self.activation, ACTIVATIONS[:-1])
