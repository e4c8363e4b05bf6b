"""Models whose greedy output is known beforehand, and a vocabulary whose ids are bytes.

Attention and ffn add nothing (their last matrices are zero), embeddings are one-hot, and the head is a table of scores.
A walk looks the last id up in that table; a script looks up the position, so that its ids may repeat.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from foreign import save_folder
from tiny import layer, random_params

from jaxlm import Model
from jaxlm.config import LearnedPositions, ModelConfig
from jaxlm.params import abstract_params
from jaxlm.tokenizer import Tokenizer

BOS, EOS = 256, 257
VOCAB = 258
SCORE = 9.0  # The logit of the scripted id, with a last norm that keeps one-hot vectors of any width as they are.


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2)."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in kept]
    return [chr(b) if b in kept else chr(256 + others.index(b)) for b in range(256)]


def tokenizer_files(bos: bool = True, template: str | None = None, adds_bos: bool = False) -> dict[str, bytes]:
    """Byte-level BPE without merges: id b is byte b; then <bos> and <eos>."""
    names = ["<bos>", "<eos>"] if bos else ["<pad>", "<eos>"]
    added = [{"id": BOS + i, "content": name, "special": True} for i, name in enumerate(names)]
    for token in added:
        token |= {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {s: i for i, s in enumerate(byte_symbols())}, "merges": []},
    }
    if adds_bos:
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [BOS], "tokens": ["<bos>"]}},
        }
    config = {"eos_token": "<eos>"} | ({"bos_token": "<bos>"} if bos else {})
    if template is not None:
        config["chat_template"] = template
    return {"tokenizer.json": json.dumps(document).encode(), "tokenizer_config.json": json.dumps(config).encode()}


@functools.cache
def tokenizer(bos: bool = True, template: str | None = None, adds_bos: bool = False) -> Tokenizer:
    return Tokenizer.from_files(tokenizer_files(bos, template, adds_bos))


def idle_params(config: ModelConfig) -> dict[str, Any]:
    """Parameters of blocks that add nothing to their input."""
    def fill(path: Any, leaf: Any) -> jax.Array:
        name = path[-1].key
        return jnp.zeros(leaf.shape, leaf.dtype) if name in ("o", "down", "table", "positions") else jnp.ones(
            leaf.shape, leaf.dtype)  # fmt: skip

    return jax.tree_util.tree_map_with_path(fill, abstract_params(config))


def walk_scores(walk: Mapping[int, int], vocab: int) -> np.ndarray:
    """The head [V,V] that follows `walk`; whatever it does not name goes to the end."""
    table = np.zeros((vocab, vocab), np.float32)
    for last in range(vocab):
        table[walk.get(last, EOS), last] = SCORE / vocab**0.5
    return table


def walk_config(vocab: int = VOCAB, max_positions: int = 4096) -> ModelConfig:
    return ModelConfig(vocab, vocab, (layer(heads=1, kv_heads=1, head_dim=2, inner=2),), max_positions=max_positions)


def walk_model(walk: Mapping[int, int], vocab: int = VOCAB, max_positions: int = 4096, **changes: Any) -> Model:
    """After id `last` comes walk[last]."""
    config = walk_config(vocab, max_positions)
    params = idle_params(config)
    params["embed"]["table"] = jnp.eye(vocab, dtype=jnp.float32)
    params["lm_head"]["table"] = jnp.asarray(walk_scores(walk, vocab))
    return Model(**({"config": config, "params": params, "tokenizer": tokenizer(), "eos_ids": (EOS,)} | changes))


def text_walk(text: str, start: str = "\0") -> dict[int, int]:
    """The walk that spells a text, no byte of which may come twice, from the byte `start`, then ends."""
    data = (start + text).encode()
    assert len(set(data)) == len(data), f"{text!r} needs a script"
    return dict(zip(data, [*data[1:], EOS], strict=True))


def script_model(ids: Sequence[int] | bytes, places: int = 64, **changes: Any) -> Model:
    """After a prompt of one id come `ids`, one by one, then the end for ever."""
    config = ModelConfig(
        VOCAB, places, (layer(heads=1, kv_heads=1, head_dim=2, inner=2),),
        max_positions=places, positions=LearnedPositions(places),
    )  # fmt: skip
    params = idle_params(config)
    params["embed"]["positions"] = jnp.eye(places, dtype=jnp.float32)
    head = np.zeros((VOCAB, places), np.float32)
    head[[*ids, *[EOS] * (places - len(ids))], range(places)] = SCORE / places**0.5
    params["lm_head"]["table"] = jnp.asarray(head)
    return Model(**({"config": config, "params": params, "tokenizer": tokenizer(), "eos_ids": (EOS,)} | changes))


def flat_model(vocab: int = VOCAB, max_positions: int = 4096, **changes: Any) -> Model:
    """Every id is as likely as any other."""
    config = walk_config(vocab, max_positions)
    fields = {"config": config, "params": idle_params(config), "tokenizer": tokenizer(), "eos_ids": (EOS,)}
    return Model(**(fields | changes))


@functools.cache
def random_config(vocab: int = VOCAB, max_positions: int = 4096) -> ModelConfig:
    return ModelConfig(vocab, 16, (layer(), layer()), max_positions=max_positions)


@functools.cache
def random_model(seed: int = 0, vocab: int = VOCAB, max_positions: int = 4096) -> Model:
    """Random weights that make lively logits, and the vocabulary of bytes."""
    config = random_config(vocab, max_positions)
    return Model(config, random_params(config, seed), tokenizer(), (EOS,))


def walk_folder(
    folder: Path, walk: Mapping[int, int], template: str | None = None, max_positions: int = 4096, bos: bool = True
) -> Path:
    """A walk as a Hugging Face folder."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": VOCAB,
        "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "head_dim": 4, "max_position_embeddings": max_positions, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": EOS,
    }  # fmt: skip
    at, ones = "model.layers.0", np.ones((VOCAB,), np.float32)
    tensors = {
        "model.embed_tokens.weight": np.eye(VOCAB, dtype=np.float32), "model.norm.weight": ones,
        "lm_head.weight": walk_scores(walk, VOCAB),
        f"{at}.input_layernorm.weight": ones, f"{at}.post_attention_layernorm.weight": ones,
        f"{at}.self_attn.o_proj.weight": np.zeros((VOCAB, 4), np.float32),
        f"{at}.mlp.down_proj.weight": np.zeros((VOCAB, 4), np.float32),
    }  # fmt: skip
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        tensors[f"{at}.{name}.weight"] = np.ones((4, VOCAB), np.float32)
    save_folder(folder, config, tensors)
    for name, data in tokenizer_files(bos, template).items():
        (folder / name).write_bytes(data)
    return folder
