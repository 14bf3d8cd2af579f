"""The KDA layer against its formula, one token and one head at a time (shared sheet §2.3)."""

import pytest
import torch
import torch.nn.functional as F

from k3lite.cache import KdaState
from k3lite.kda import KimiDeltaAttention
from tests.helpers import assert_close, randomise, tiny

H, D = 2, 8


def layer_of(kind):
    layer = KimiDeltaAttention(tiny(kind)).double()
    randomise(((f"self_attn.{n}", p) for n, p in layer.named_parameters()), seed=1)
    return layer


def hidden(B=2, T=20):
    return torch.randn(B, T, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def new_state(B):
    window = torch.zeros(B, 3, H * D, dtype=torch.float64)
    return KdaState(torch.zeros(B, H, D, D, dtype=torch.float64), (window, window, window))


def conv(x, w):
    """y_t = silu(sum_j w_j x_(t-3+j)) of one text [T,C]; w: [C,1,4]."""
    before = torch.cat([torch.zeros(3, x.shape[1]).double(), x])
    return F.silu(torch.stack([sum(w[:, 0, j] * before[t + j] for j in range(4)) for t in range(len(x))]))


def formula(m, x, kind):
    """One text [T,32]."""
    w = {n.removesuffix(".weight"): p for n, p in m.named_parameters()}
    q, k, v = (conv(x @ w[f"{n}_proj"].T, w[f"{n}_conv1d"]) for n in "qkv")
    beta = (x @ w["b_proj"].T).sigmoid()
    z = (x @ w["f_a_proj"].T @ w["f_b_proj"].T + w["dt_bias"]).view(-1, H, D)
    rate = w["A_log"].exp()[:, None]
    g = -5 * torch.sigmoid(rate * z) if kind == "k3" else -rate * torch.log1p(z.exp())
    gate = x @ w["g_proj"].T if kind == "k3" else x @ w["g_a_proj"].T @ w["g_b_proj"].T
    states, rows = torch.zeros(H, D, D).double(), []
    for t in range(len(x)):
        row, new = [], []
        for h in range(H):
            part = slice(D * h, D * (h + 1))
            q_t, k_t = (a[t, part] / (a[t, part].square().sum() + 1e-6).sqrt() for a in (q, k))
            S = g[t, h].exp()[:, None] * states[h]
            S = S + beta[t, h] * torch.outer(k_t, v[t, part] - S.T @ k_t)
            o = S.T @ q_t / D**0.5
            o = w["o_norm"] * o / (o.square().mean() + 1e-5).sqrt()
            row.append(o * gate[t, part].sigmoid())
            new.append(S)
        states = torch.stack(new)
        rows.append(torch.cat(row))
    return torch.stack(rows) @ w["o_proj"].T, states


@pytest.mark.parametrize("backend", ["recurrent", "chunk"])
@pytest.mark.parametrize("kind", ["k3", "linear"])
def test_formula(kind, backend):
    layer, x, state = layer_of(kind), hidden(), new_state(2)
    layer.backend = backend
    got = layer(x, state)
    for i in range(2):
        want, S = formula(layer, x[i], kind)
        assert_close(f"y {i}", got[i], want, 1e-12)
        assert_close(f"S {i}", state.S[i], S, 1e-12)
    assert_close("without a state", layer(x), got, 1e-12)


@pytest.mark.parametrize("pieces", [[20], [1] * 20, [2, 1, 17]], ids=len)
def test_pieces(pieces):
    layer, x, state = layer_of("k3"), hidden(), new_state(2)
    got = torch.cat([layer(part, state) for part in x.split(pieces, 1)], 1)
    assert_close("y", got, layer(x), 1e-12)


def test_the_window_holds_the_last_three_inputs_before_the_convolution():
    layer, x, state = layer_of("k3"), hidden(), new_state(2)
    layer(x, state)
    for window, proj in zip(state.conv, (layer.q_proj, layer.k_proj, layer.v_proj), strict=True):
        assert torch.equal(window, proj(x)[:, -3:])


@pytest.mark.parametrize("pieces", [[20], [3, 17], [10, 10]], ids=str)
def test_padding_is_the_time_before_the_text(pieces):
    """No input, no decay, no write: the state stays at zero, bit for bit, and the windows with it."""
    layer, x, state = layer_of("k3"), hidden(), new_state(2)
    mask = torch.arange(20) >= torch.tensor([[0], [12]])
    parts = zip(x.split(pieces, 1), mask.split(pieces, 1), strict=True)
    got = torch.cat([layer(part, state, m) for part, m in parts], 1)
    alone = new_state(1)
    assert_close("y", got[1:, 12:], layer(x[1:, 12:], alone), 1e-12)
    assert_close("S", state.S[1:], alone.S, 1e-12)
    state = new_state(2)
    layer(x, state, torch.zeros(2, 20, dtype=torch.bool))
    assert not state.S.any() and not any(w.any() for w in state.conv)


def test_a_masked_token_leaves_a_running_state_alone():
    layer, x, state = layer_of("k3"), hidden(), new_state(2)
    layer(x, state)
    before = state.S.clone()
    layer(hidden(), state, torch.zeros(2, 20, dtype=torch.bool))
    assert torch.equal(state.S, before)


def test_gates_at_initialisation():
    """K3: A = 0 and dt in [1e-3, 1e-1] give g from -0.005 to -0.476 at zero input, half-lives of 139 to 1.5 tokens."""
    layer = KimiDeltaAttention(tiny("k3", hidden_size=8))
    layer.init_gates(torch.Generator().manual_seed(0))
    g = layer.log_decay(torch.zeros(1, 1, 8))
    assert -0.4762 < g.min() and g.max() < -0.00499
