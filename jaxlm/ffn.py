"""The feed-forward network: works on each token by itself."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlm.config import FFNSpec
from jaxlm.linear import add_bias, project, project_all


def ffn(params: dict[str, Any], x: jax.Array, spec: FFNSpec) -> jax.Array:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where there is no gate. x [B,T,D] -> [B,T,D], same dtype."""
    names = ["up", "gate"] if spec.gated else ["up"]
    opened = project_all(["BTD,FD->BTF"] * len(names), x, [params[name] for name in names])
    up, *gates = (add_bias(a, params.get(f"{name}_bias")) for name, a in zip(names, opened, strict=True))
    gate = gates[0] if gates else None
    inner = activate(up, gate, params, spec)
    return add_bias(project("BTF,DF->BTD", inner, params["down"]), params.get("down_bias"))


def activate(up: jax.Array, gate: jax.Array | None, params: dict[str, Any], spec: FFNSpec) -> jax.Array:
    """What goes into `down`: act(gate) * (up + offset), or act(up). [..., F] -> the same; in float32 inside."""
    wide = up.astype(jnp.float32)
    if spec.clamp:
        wide = jnp.clip(wide, -spec.clamp, spec.clamp)
    if gate is None:
        return activation(wide, params, spec.activation).astype(up.dtype)
    opened = gate.astype(jnp.float32)
    if spec.clamp:
        opened = jnp.minimum(opened, spec.clamp)
    return (activation(opened, params, spec.activation) * (wide + spec.up_offset)).astype(up.dtype)


def activation(x: jax.Array, params: dict[str, Any], name: str) -> jax.Array:
    """SiLU (Elfwing et al. 2017), GELU exact, by tanh or by sigmoid(1.702 x) (Hendrycks & Gimpel 2016), ReLU, ReLU^2
    (So et al. 2021) or xIELU (Huang & Schlag 2024). float32 -> float32, same shape."""
    match name:
        case "silu":
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "quick_gelu":
            return x * jax.nn.sigmoid(1.702 * x)
        case "relu":
            return jax.nn.relu(x)
        case "relu2":
            return jnp.square(jax.nn.relu(x))
        case "xielu":
            return xielu(x, params)
    raise ValueError(f"activation is {name!r}")


def xielu(x: jax.Array, params: dict[str, Any]) -> jax.Array:
    """x > 0: a_p x^2 + beta x, else a_n (exp(min(x, eps)) - 1 - x) + beta x, with a_p = softplus(alpha_p) and
    a_n = beta + softplus(alpha_n); alpha_p, alpha_n, beta and eps [1]."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    alpha_p, alpha_n, beta, eps = (params[name].astype(jnp.float32)[0] for name in names)
    below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + jax.nn.softplus(alpha_n))
    return jnp.where(x > 0, jax.nn.softplus(alpha_p) * jnp.square(x), below) + beta * x
