"""Vectors made for each layer from the token and its embedding, and how a layer takes its own in (see `LayerInput`)."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import LayerInput, LayerSpec, ModelConfig
from jaxlm.ffn import activation
from jaxlm.linear import project
from jaxlm.norm import norm
from jaxlm.params import Params


def layer_inputs(params: Params, rows: jax.Array, x: jax.Array, config: ModelConfig) -> jax.Array:
    """The vectors of all layers. rows [B,T,L,P] of the table, embeddings x [B,T,D] -> [L,B,T,P] in x's dtype."""
    made = project("BTD,LPD->BTLP", x, params["embed"]["layer_proj"]) * x.shape[-1] ** -0.5
    made = norm(params["embed"].get("layer_norm", {}), made, config.layers[0].norm)
    known = rows * jnp.asarray(rows.shape[-1] ** 0.5, rows.dtype)
    return jnp.moveaxis((made + known.astype(x.dtype)) * 2.0**-0.5, 2, 0)


def take_in(params: dict[str, Any], x: jax.Array, vector: jax.Array, layer: LayerSpec, spec: LayerInput) -> jax.Array:
    """x + norm(out(act(gate(x)) * vector)). x [B,T,D], vector [B,T,P] -> [B,T,D]."""
    gate = activation(project("BTD,PD->BTP", x, params["gate"], jnp.float32), {}, spec.activation).astype(x.dtype)
    out = project("BTP,DP->BTD", gate * vector, params["out"])
    return x + norm(params.get("norm", {}), out, layer.norm)
