"""The demo model as a trainable module: DeepSeek-V3's architecture, small, in plain torch.

Owns the forward pass used for training; the daemon's own is elsewhere and shares no code with it.
All experts of a layer are computed for every token as one wide gated MLP and masked by the routing
weights: the same function as sparse dispatch, and faster at this size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latentd.demo.architecture import (
    CONFIG,
    EPS,
    EXPERT_WIDTH,
    EXPERTS,
    HEADS,
    HIDDEN,
    LATENT,
    NOPE,
    ROPE,
    VALUE,
)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last axis. x [b, t, h, ROPE]; cos, sin [t, 1, ROPE / 2]."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).type_as(x)


class Attention(nn.Module):
    """Multi-head latent attention, expanded (no latent cache: training only)."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(HIDDEN, LATENT + ROPE, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(LATENT, eps=1e-6)
        self.kv_b_proj = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.o_proj = nn.Linear(HEADS * VALUE, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [b, t, HIDDEN] -> [b, t, HIDDEN]."""
        q_nope, q_rope = self.q_proj(x).unflatten(-1, (HEADS, -1)).split((NOPE, ROPE), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((LATENT, ROPE), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent.float())).unflatten(-1, (HEADS, -1))
        k_nope, v = kv.split((NOPE, VALUE), -1)
        k_rope = rotate(k_rope.unsqueeze(2), cos, sin).expand(-1, -1, HEADS, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1).transpose(1, 2)
        k = torch.cat((k_nope, k_rope), -1).transpose(1, 2)
        # The flash kernel wants one width for q, k and v: pad v and cut the padding off again.
        v = F.pad(v, (0, NOPE + ROPE - VALUE)).transpose(1, 2)
        scale = (NOPE + ROPE) ** -0.5
        out = F.scaled_dot_product_attention(q, k, v.type_as(q), is_causal=True, scale=scale)
        mixed: Tensor = self.o_proj(out[..., :VALUE].transpose(1, 2).flatten(-2))
        return mixed


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x); `weights` scales equal runs of the inner width, one per expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, width, bias=False)
        self.up_proj = nn.Linear(HIDDEN, width, bias=False)
        self.down_proj = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """x [b, t, HIDDEN], weights [b, t, runs] -> [b, t, HIDDEN]."""
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        if weights is not None:
            runs = inner.unflatten(-1, (weights.shape[-1], -1))
            inner = (runs * weights.unsqueeze(-1).type_as(runs)).flatten(-2)
        out: Tensor = self.down_proj(inner)
        return out


class Router(nn.Module):
    """Sigmoid scores; the bias takes part in the choice only and is no parameter."""

    e_score_correction_bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """x [b, t, HIDDEN] -> routing weights [b, t, EXPERTS], zero where not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.weight.float()))
        biased = scores.detach() + self.e_score_correction_bias
        chosen = biased.topk(CONFIG["num_experts_per_tok"], dim=-1).indices
        kept = scores * torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        scale: float = CONFIG["routed_scaling_factor"]
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * scale


class MoE(nn.Module):
    """Routed and shared experts side by side in one GatedMLP; the shared one is the last run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Router()
        self.experts = GatedMLP((EXPERTS + 1) * EXPERT_WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [b, t, HIDDEN] -> output, and the share of choices each expert got, [EXPERTS]."""
        weights = self.gate(x)
        load = (weights > 0).float().mean((0, 1)) / CONFIG["num_experts_per_tok"]
        with_shared = torch.cat((weights, torch.ones_like(weights[..., :1])), -1)
        return self.experts(x, with_shared), load


class Layer(nn.Module):
    """Pre-norm attention and MLP with dropout on both branches."""

    def __init__(self, dense: bool, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.mlp = GatedMLP(CONFIG["intermediate_size"]) if dense else MoE()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [b, t, HIDDEN] -> [b, t, HIDDEN], expert loads or None."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        out = self.mlp(self.post_attention_layernorm(x))
        out, load = out if isinstance(out, tuple) else (out, None)
        return x + self.dropout(out), load


class Backbone(nn.Module):
    """Embedding, layers, final norm."""

    cos: Tensor
    sin: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], HIDDEN)
        dense: int = CONFIG["first_k_dense_replace"]
        layers: int = CONFIG["num_hidden_layers"]
        self.layers = nn.ModuleList(Layer(i < dense, dropout) for i in range(layers))
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.dropout = nn.Dropout(dropout)
        turns = CONFIG["rope_theta"] ** -(torch.arange(0, ROPE, 2) / ROPE)
        angles = torch.outer(torch.arange(CONFIG["max_position_embeddings"]), turns).unsqueeze(1)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [b, t] -> hidden states [b, t, HIDDEN], expert loads [moe_layers, EXPERTS]."""
        x, loads = self.dropout(self.embed_tokens(ids)), []
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x, load = layer(x, cos, sin)
            if load is not None:
                loads.append(load)
        return self.norm(x), torch.stack(loads)


class Network(nn.Module):
    """The whole model. Parameter names are the published ones, but for the experts of a layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.model = Backbone(dropout)
        self.lm_head = nn.Linear(HIDDEN, CONFIG["vocab_size"], bias=False)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            depth = (2 * CONFIG["num_hidden_layers"]) ** -0.5 if into_residual else 1.0
            nn.init.normal_(parameter, std=CONFIG["initializer_range"] * depth)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """ids, targets [b, t] -> loss of every position in nats [b, t], expert loads."""
        hidden, loads = self.model(ids)
        logits = self.lm_head(hidden).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets), loads
