"""The gated delta rule: one token at a time, and in chunks of tokens that are computed in parallel.

Per head, with keys k and queries q `[dk]`, values v `[dv]`, log decay g <= 0 and write strength beta, the state S
`[dk, dv]` follows (Yang et al. 2024, arXiv 2412.06464, equation 10)

    S <- exp(g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q.

A token with g = 0 and beta = 0 leaves the state as it is.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

CHUNK = 64
"""Tokens per chunk: the matrices inside one are of this size."""

_matmul = functools.partial(jnp.matmul, precision="highest")  # the default is BF16 on TPUs, TF32 on GPUs


def delta_step(
    q: Float[Array, "B H dk"],
    k: Float[Array, "B H dk"],
    v: Float[Array, "B H dv"],
    g: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H dk dv"],
) -> tuple[Float[Array, "B H dv"], Float[Array, "B H dk dv"]]:
    """One token. Returns its output and the state after it.

    Key and query read the old state together, so that the state, which is most of what decode moves, is read once:
    S^T q of the new state is exp(g) S^T q of the old one plus (k.q) u.
    """
    kept = jnp.exp(g)[..., None]
    read = kept[..., None] * _matmul(jnp.stack([k, q], axis=-2), state)
    u = beta[..., None] * (v - read[..., 0, :])
    out = read[..., 1, :] + jnp.sum(k * q, axis=-1, keepdims=True) * u
    return out, kept[..., None] * state + k[..., :, None] * u[..., None, :]


def delta_rule_recurrent(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv dk dv"],
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "B Hv dk dv"]]:
    """All T tokens one after the other: the definition, and decode (T = 1).

    Each key head serves Hv / Hk consecutive value heads. Arguments are of one dtype, float32 or wider, and so are what
    is returned: the outputs of all tokens, and the state after the last.
    """
    repeats = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, repeats, axis=2) for x in (q, k))
    if v.shape[1] == 1:
        out, state = delta_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
        return out[:, None], state

    def step(state, token):
        out, state = delta_step(*token, state)
        return state, out

    by_token = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta)]
    state, out = lax.scan(step, state, by_token)
    return jnp.moveaxis(out, 0, 1), state


def delta_rule_chunked(
    q: Float[Array, "B T Hk dk"],
    k: Float[Array, "B T Hk dk"],
    v: Float[Array, "B T Hv dv"],
    g: Float[Array, "B T Hv"],
    beta: Float[Array, "B T Hv"],
    state: Float[Array, "B Hv dk dv"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "B T Hv dv"], Float[Array, "B Hv dk dv"]]:
    """What `delta_rule_recurrent` computes, as matrix products within chunks and a scan over the chunks.

    T need not be a multiple of `chunk`; g may be as low as -inf. Within a chunk that starts from the state S, the u of
    all its tokens solve a unit lower triangular system (the WY or UT form, Yang et al. 2024, arXiv 2406.06484)

        (I + A) u = beta (v - exp(G) S^T k),   A_ij = beta_i exp(G_i - G_j) k_i.k_j  for j < i,

    with G the sum of g since the start of the chunk. The inverse does not depend on S, so that all chunks are solved at
    once, and only S goes from one to the next.
    """
    batch, tokens, key_heads, _ = k.shape
    value_heads, chunks = v.shape[2], -(-tokens // chunk)
    groups = (key_heads, value_heads // key_heads)

    def split(x, *heads):
        """[B, T, H, ...] -> [B, *heads, chunks, chunk, ...], padded with zeros, which leave the state as it is."""
        x = jnp.pad(x, [(0, 0), (0, chunks * chunk - tokens)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, chunks, chunk, *heads, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (1 + len(heads), 2 + len(heads)))

    # Value heads of one key head share its q and k: the products of these are taken once.
    by_head = jax.vmap(jax.vmap(jax.vmap(_chunks_of_head, in_axes=(None, None, 0, 0, 0, 0))))
    out, after = by_head(
        *(split(x, key_heads) for x in (q, k)),
        *(split(x, *groups) for x in (v, g, beta)),
        state.reshape(batch, *groups, *state.shape[2:]),
    )
    out = jnp.moveaxis(out, (3, 4), (1, 2)).reshape(batch, chunks * chunk, *v.shape[2:])
    return out[:, :tokens], after.reshape(state.shape)


def _chunks_of_head(
    q: Float[Array, "N C dk"],
    k: Float[Array, "N C dk"],
    v: Float[Array, "N C dv"],
    g: Float[Array, "N C"],
    beta: Float[Array, "N C"],
    state: Float[Array, "dk dv"],
) -> tuple[Float[Array, "N C dv"], Float[Array, "dk dv"]]:
    """N chunks of one value head."""

    def step(state, of_chunk):
        written, erased, attention, queries, remaining, kept = of_chunk
        u = written - _matmul(erased, state)
        out = _matmul(queries, state) + _matmul(attention, u)
        return kept * state + _matmul(remaining.T, u), out

    after, out = lax.scan(step, state, jax.vmap(_solve_chunk)(q, k, v, g, beta))
    return out, after


def _solve_chunk(
    q: Float[Array, "C dk"],
    k: Float[Array, "C dk"],
    v: Float[Array, "C dv"],
    g: Float[Array, " C"],
    beta: Float[Array, " C"],
):
    """What of one chunk does not depend on the state S at its start.

    u is `written` less `erased` S; the tokens' outputs are `queries` S plus `attention` u; at the end of the chunk S
    has become `kept` S plus `remaining`^T u.
    """
    between, since_start = decay_between(g), jnp.exp(jnp.cumsum(g))[:, None]
    beta = beta[:, None]
    inverse = unit_lower_inverse(jnp.tril(beta * between * _matmul(k, k.T), -1))
    written, erased = _matmul(inverse, beta * v), _matmul(inverse, beta * since_start * k)
    attention, queries = between * _matmul(q, k.T), since_start * q
    return written, erased, attention, queries, between[-1][:, None] * k, since_start[-1:]


def decay_between(g: Float[Array, " C"]) -> Float[Array, "C C"]:
    """exp(g_{j+1} + ... + g_i) at [i, j], 1 on the diagonal and 0 above it.

    Each sum is taken over its own tokens: differences of one running sum would lose the small decays that follow a
    strong one, and be NaN after -inf. Nothing is summed above the diagonal, where the exponents would be positive, so
    values and gradients stay finite.
    """
    row, column = jnp.indices((g.size, g.size))
    total = jnp.cumsum(jnp.where(row > column, g[:, None], 0), axis=0)
    return jnp.tril(jnp.exp(total))


@jax.custom_vjp
def unit_lower_inverse(a: Float[Array, "C C"]) -> Float[Array, "C C"]:
    """Inverse of I + a, for strictly lower triangular a.

    Block forward substitution: the inverses of neighbouring diagonal blocks give that of the block of twice their
    width, in 2 log2(C) matrix products in all. (The product of I + a^(2^n) takes as many, but the powers of a can grow
    like binomials before they cancel.)
    """
    row, column = jnp.indices(a.shape)

    def double(level, inverse):
        row_block, column_block = row >> level, column >> level
        neighbours = (row_block == column_block + 1) & (row_block & 1 == 1)
        return inverse - _matmul(_matmul(inverse, jnp.where(neighbours, a, 0)), inverse)

    # A loop: the products are compiled once, not once per level.
    return lax.fori_loop(0, (len(a) - 1).bit_length(), double, jnp.eye(len(a), dtype=a.dtype))


def _unit_lower_inverse_fwd(a):
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _unit_lower_inverse_bwd(inverse, cotangent):
    return (-jnp.tril(_matmul(_matmul(inverse.T, cotangent), inverse.T), -1),)


unit_lower_inverse.defvjp(_unit_lower_inverse_fwd, _unit_lower_inverse_bwd)
