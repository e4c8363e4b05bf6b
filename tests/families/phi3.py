"""Phi-3: windows, both sets of LongRoPE divisors, partly rotated heads."""

from family_cases import Case

BASE = {
    "model_type": "phi3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def longrope(fraction: float = 1.0) -> dict[str, object]:
    """Divisors for heads of 8 lanes."""
    pairs = int(8 * fraction) // 2
    short, long = ([step * (i + 1) for i in range(pairs)] for step in (1.25, 2.5))
    kind = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": fraction}
    return kind | {"short_factor": short, "long_factor": long}


CASES = (
    Case("window", BASE | {"sliding_window": 5}, seed=1),
    Case("plain", BASE | {"num_key_value_heads": None}),
    Case("short", BASE | {"rope_parameters": longrope()}, seed=2),
    # Decoding begins beyond the original length, so that every step uses the long divisors, as does the whole at once.
    Case("long", BASE | {"original_max_position_embeddings": 2, "rope_parameters": longrope()}, seed=3),
    Case(
        "partial_tied_window",
        BASE
        | {"original_max_position_embeddings": 2, "rope_parameters": longrope(0.75), "tie_word_embeddings": True}
        | {"sliding_window": 6, "num_key_value_heads": 1},
        seed=4,
    ),
    Case(
        "factor",
        BASE | {"original_max_position_embeddings": 2, "rope_parameters": longrope() | {"attention_factor": 1.3}},
        seed=5,
    ),
    Case("wide_heads", BASE | {"head_dim": 12, "hidden_act": "gelu"}, seed=6),
)
