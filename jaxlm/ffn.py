"""The feed-forward network: works on each token by itself."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import FFNSpec
from jaxlm.linear import add_bias, project


def ffn(params: dict[str, Any], x: jax.Array, spec: FFNSpec) -> jax.Array:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where there is no gate. x [B,T,D] -> [B,T,D], same dtype."""
    up = add_bias(project("BTD,FD->BTF", x, params["up"]), params.get("up_bias"))
    if spec.gated:
        gate = add_bias(project("BTD,FD->BTF", x, params["gate"]), params.get("gate_bias"))
        inner = activate(gate, spec.activation) * up
    else:
        inner = activate(up, spec.activation)
    return add_bias(project("BTF,DF->BTD", inner, params["down"]), params.get("down_bias"))


def activate(x: jax.Array, name: str) -> jax.Array:
    """SiLU (Elfwing et al. 2017), GELU, exact or by tanh (Hendrycks & Gimpel 2016), or ReLU; computed in float32."""
    wide = x.astype(jnp.float32)
    match name:
        case "silu":
            return jax.nn.silu(wide).astype(x.dtype)
        case "gelu":
            return jax.nn.gelu(wide, approximate=False).astype(x.dtype)
        case "gelu_tanh":
            return jax.nn.gelu(wide, approximate=True).astype(x.dtype)
        case "relu":
            return jax.nn.relu(wide).astype(x.dtype)
    raise ValueError(f"activation is {name!r}")
