"""The whole of K3: embedding, decoder layers on a depth stream, final mix, norm and head.

    h = embedding;  B = []
    for each layer i:
        a = mix(B + [h])                       what attention reads (layer 0: h)
        every attn_res_block_size layers: B += [h], h = 0     0.5: every sub-layer (Full AttnRes)
        h = h + Attn_i(RMSNorm(a))             KDA or gated MLA
        m = mix(B + [h])
        h = h + FFN_i(RMSNorm(m))              dense MLP or LatentMoE
    logits = lm_head( RMSNorm( mix(B + [h]) ) )

Without `attn_res_block_size` (Kimi Linear) every mix is just h. Source: k3-architecture §2.1, §2.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3lite.attn_res import DepthStream
from k3lite.budget import PAGE_SIZE
from k3lite.cache import K3Cache, KdaState, LatentCache
from k3lite.config import K3Config
from k3lite.kda import KimiDeltaAttention
from k3lite.mla import GatedMLA
from k3lite.mlp import GatedMLP, RMSNorm, linear
from k3lite.moe import Experts, LatentMoE, Router
from k3lite.ops.pointwise import check_cu_seqlens


class DecoderLayer(nn.Module):
    """One layer: attention and feed-forward, each reading the depth stream and adding to it."""

    def __init__(self, config: K3Config, index: int) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.input_layernorm = RMSNorm(d, eps)
        self.self_attn = KimiDeltaAttention(config) if config.layer_kinds[index] == "kda" else GatedMLA(config)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.moe = config.is_moe_layer(index)
        if self.moe:
            self.block_sparse_moe = LatentMoE(config)
        else:
            self.mlp = GatedMLP(config, config.intermediate_size)
        if config.attn_res_block_size is not None:
            self.self_attention_res_norm, self.self_attention_res_proj = RMSNorm(d, eps), linear(d, 1)
            self.mlp_res_norm, self.mlp_res_proj = RMSNorm(d, eps), linear(d, 1)

    def forward(
        self,
        stream: DepthStream,
        state: KdaState | LatentCache | None,
        mask: Tensor | None,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        """Reads from and adds to `stream`. mask: [B,T] of the new tokens; key_mask: [B,L] of all cached ones."""
        x = self.input_layernorm(stream.read(self, "self_attention_res"))
        stream.seal_before(self.index)
        attn_mask = mask if isinstance(self.self_attn, KimiDeltaAttention) else key_mask
        stream.add(self.self_attn(x, state, attn_mask, cu_seqlens))

        x = self.post_attention_layernorm(stream.read(self, "mlp_res"))
        stream.seal_before(self.index + 0.5)
        stream.add(self.block_sparse_moe(x, mask) if self.moe else self.mlp(x))


class K3Model(nn.Module):
    """Token ids [B,T] -> hidden states [B,T,d] after the final norm."""

    stream_type = DepthStream  # one model's may be set to a kind that also watches or changes what is read

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(d, config.rms_norm_eps)
        if config.attn_res_block_size is not None:
            self.output_attn_res_norm, self.output_attn_res_proj = RMSNorm(d, config.rms_norm_eps), linear(d, 1)

    def forward(self, ids: Tensor, cache: K3Cache | None, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        config = self.config
        if cache is not None:
            cache.extend(ids.shape[1], mask)
        key_mask = mask if cache is None else cache.mask
        stream = self.stream_type(self.embed_tokens(ids), config.attn_res_block_size, config.rms_norm_eps)
        for i, layer in enumerate(self.layers):
            layer(stream, cache.layers[i] if cache else None, mask, key_mask, cu_seqlens)
        return self.norm(stream.read(self, "output_attn_res"))


@dataclass
class K3Output:
    """logits: [B, T or logits_to_keep, vocab], fp32 (fp64 for fp64).   loss: scalar, if labels were given."""

    logits: Tensor
    loss: Tensor | None = None


class K3ForCausalLM(nn.Module):
    """The language model. Built under `torch.device("meta")` it has shapes and no storage."""

    def __init__(self, config: K3Config, seed: int = 0) -> None:
        """Weights in config.dtype (convolutions, gates and balancing bias in fp32), initialised from `seed`."""
        super().__init__()
        self.config = config
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, config.dtype))
        try:
            # Modules are made without values and filled once below: torch's own initialisation would be wasted.
            with torch.device("meta"):
                self.model = K3Model(config)
                self.lm_head = linear(config.hidden_size, config.vocab_size)
        finally:
            torch.set_default_dtype(before)
        device = torch.get_default_device()
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights(torch.Generator(device).manual_seed(seed))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Matrices normal(0, initializer_range); norms 1; depth queries 0, so that a mix starts as the plain mean
        of its sources (Attention Residuals paper §5: must be zero); gates as in `KimiDeltaAttention.init_gates`.
        """
        std = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, Router)):
                module.weight.normal_(0, std, generator=generator)
            if isinstance(module, Experts):
                for w in (module.w1, module.w3, module.w2):
                    w.normal_(0, std, generator=generator)
            elif isinstance(module, Router):
                module.e_score_correction_bias.zero_()
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1)
            elif isinstance(module, KimiDeltaAttention):
                module.init_gates(generator)
        for name, p in self.named_parameters():
            if name.endswith("res_proj.weight"):
                p.zero_()

    def forward(
        self,
        input_ids: Tensor,
        *,
        cache: K3Cache | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | None = None,
    ) -> K3Output:
        """Next-token logits, and the loss if labels are given.

        input_ids: [B,T].   cache: from `new_cache`; filled as a side effect.
        attention_mask: [B,T], 0 for padding; with a cache, padding may only come before the first real token.
        cu_seqlens: [N+1] starts of sequences packed into one row (B = 1, no cache, no mask).
        labels: [B,T] like input_ids, -100 where no loss is wanted; token t is predicted from those before it. With a
            cache only under no_grad: no gradient flows through cached latents.
        logits_to_keep: compute logits of the last so many tokens only.
        Raises ValueError that names the argument.
        """
        mask = self._check(input_ids, cache, attention_mask, cu_seqlens, labels, logits_to_keep)
        hidden = self.model(input_ids, cache, mask, cu_seqlens)
        if logits_to_keep is not None:
            hidden = hidden[:, hidden.shape[1] - logits_to_keep :]
        logits = self.lm_head(hidden)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return K3Output(logits, None if labels is None else _loss(logits, labels, mask, cu_seqlens))

    def new_cache(self, batch: int = 1, *, pages: int | None = None, page_size: int = PAGE_SIZE) -> K3Cache:
        """An empty hybrid cache on the model's device and in its dtype.

        pages: pages of latents there are for the batch, of `page_size` tokens each (PoolFull when they run out); None:
        as many as it takes.
        """
        weight = self.model.embed_tokens.weight
        return K3Cache.empty(self.config, batch, weight.dtype, weight.device, pages=pages, page_size=page_size)

    def auxiliary_loss(self) -> Tensor:
        """What the routers under the auxiliary rule add to the loss of the last training forward; 0 without such."""
        asked = [m.auxiliary for m in self.modules() if isinstance(m, Router) and m.auxiliary is not None]
        return sum(asked, torch.zeros((), device=self.lm_head.weight.device))

    def balance_experts(self) -> None:
        """After an optimizer step: every router sets its bias by its rule (training only)."""
        for module in self.modules():
            if isinstance(module, Router):
                module.balance()

    def parameter_parts(self) -> dict[str, int]:
        """Parameters by part, counted on the real tensors; the keys of `budget.parameters`."""
        parts: dict[str, int] = {}
        for name, p in self.named_parameters():
            part = _part(name, self.config)
            parts[part] = parts.get(part, 0) + p.numel()
        return parts

    def _check(self, ids, cache, attention_mask, cu_seqlens, labels, logits_to_keep) -> Tensor | None:
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(f"input_ids: got {ids.dtype} of shape {tuple(ids.shape)}, wanted whole numbers [B, T]")
        if ids.numel() == 0 or ids.dtype == torch.bool:
            raise ValueError(f"input_ids: got {ids.dtype} of shape {tuple(ids.shape)}, wanted at least one token id")
        if not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise ValueError(
                f"input_ids: got ids {int(ids.min())}..{int(ids.max())}, wanted 0..{self.config.vocab_size - 1}"
            )
        if cache is not None and cache.batch != ids.shape[0]:
            raise ValueError(f"cache: made for batch {cache.batch}, got input_ids with batch {ids.shape[0]}")
        if cache is not None and cache.kinds != self.config.layer_kinds:
            raise ValueError("cache: made for a model with other layers")
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, *ids.shape)
        if cache is not None and labels is not None and torch.is_grad_enabled():
            raise ValueError("labels: no gradient flows through a cache; train without one, or measure under no_grad")
        if cu_seqlens is not None and (cache is not None or attention_mask is not None):
            raise ValueError("cu_seqlens: packed sequences take no cache and no attention_mask")
        for name, x in (("attention_mask", attention_mask), ("labels", labels)):
            if x is not None and x.shape != ids.shape:
                raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted {tuple(ids.shape)} like input_ids")
        if logits_to_keep is not None and not 1 <= logits_to_keep <= ids.shape[1]:
            raise ValueError(f"logits_to_keep: got {logits_to_keep}, wanted 1..{ids.shape[1]}")
        if logits_to_keep is not None and labels is not None:
            raise ValueError("logits_to_keep: the loss needs all logits; leave it out when labels are given")
        if labels is not None and bool(((labels >= self.config.vocab_size) | (labels < 0) & (labels != -100)).any()):
            raise ValueError(f"labels: wanted 0..{self.config.vocab_size - 1}, or -100 where no loss is wanted")
        if attention_mask is None:
            return None
        mask = attention_mask.bool()
        if cache is not None:
            begun = (
                torch.full_like(mask[:, :1], cache.seen > 0) if cache.mask is None else cache.mask.any(1, keepdim=True)
            )
            after = torch.cat([begun, mask], dim=1)
            if bool((after[:, :-1] & ~after[:, 1:]).any()):
                raise ValueError("attention_mask: with a cache, padding may only come before a sequence's first token")
        return None if bool(mask.all()) else mask


def _loss(logits: Tensor, labels: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Mean cross-entropy in nats of labels[t] given the tokens before t; never across a padding or packing border."""
    targets = labels[:, 1:].clone()
    if mask is not None:
        targets[~(mask[:, 1:] & mask[:, :-1])] = -100
    if cu_seqlens is not None:
        starts = cu_seqlens[(cu_seqlens > 0) & (cu_seqlens < labels.shape[1])]
        targets[0, starts - 1] = -100
    if not bool((targets != -100).any()):
        raise ValueError("labels: no token is left to predict (the first of a sequence has nothing before it)")
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)


def _part(name: str, config: K3Config) -> str:
    if name.startswith("lm_head"):
        return "lm_head"
    if "embed_tokens" in name:
        return "embed_tokens"
    if "_res_" in name:
        return "attn_res"
    if ".self_attn." in name:
        return config.layer_kinds[int(name.split(".")[2])]
    if ".block_sparse_moe." in name:
        inner = name.split(".")[4]
        return {"gate": "router", "experts": "routed_experts", "shared_experts": "shared_experts"}.get(inner, "latent")
    return "dense_mlp" if ".mlp." in name else "norms"
