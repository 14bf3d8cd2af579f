"""What a sequence carries from one token to the next: a fixed state per KDA layer, a growing list per MLA layer.

No tensor in here is ever written in place: a step replaces it. A copied cache therefore stays what it was.
`nbytes()` is the sum of the tensors, and `budget.cache_bytes` predicts it exactly (padding masks excepted,
which exist for padded batches only: one byte a token).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from k3lite.budget import CacheBytes
from k3lite.config import K3Config, LayerKind


@dataclass
class KdaState:
    """One KDA layer: S [B,H,K,V] in fp32, and for q, k and v the last W-1 inputs of the convolution [B,W-1,H*K]."""

    S: Tensor
    conv: tuple[Tensor, Tensor, Tensor]


@dataclass
class LatentCache:
    """One MLA layer: a slot of rank + rope numbers for each token, [B,L,rank+rope]."""

    latents: Tensor

    def append(self, new: Tensor) -> Tensor:
        self.latents = torch.cat([self.latents, new], dim=1)
        return self.latents


@dataclass
class K3Cache:
    """The hybrid cache of a batch of sequences."""

    layers: list[KdaState | LatentCache]
    seen: int = 0  # tokens so far, padding included
    mask: Tensor | None = None  # [B, seen], False for padding; None while there was none

    @classmethod
    def empty(cls, config: K3Config, batch: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> K3Cache:
        """Before the first token. dtype is that of latents and convolution inputs; states are fp32 (fp64 if it is)."""
        a = config.linear_attn_config
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        layers: list[KdaState | LatentCache] = []
        for kind in config.layer_kinds:
            if kind == "kda":
                S = zeros(a.num_heads, a.head_dim, a.head_dim, dtype=state_dtype)
                window = zeros(a.short_conv_kernel_size - 1, config.kda_width)
                layers.append(KdaState(S, (window, window, window)))
            else:
                layers.append(LatentCache(zeros(0, config.latent_width)))
        return cls(layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, like K3Config.layer_kinds."""
        return tuple("kda" if isinstance(x, KdaState) else "mla" for x in self.layers)

    @property
    def batch(self) -> int:
        first = self.layers[0]
        return (first.S if isinstance(first, KdaState) else first.latents).shape[0]

    def extend_mask(self, mask: Tensor | None, new: int) -> None:
        """Remember which of the `new` tokens are real. mask: [B, new] bool, or None if all are."""
        if mask is not None or self.mask is not None:
            old = self._all_real(self.seen) if self.mask is None else self.mask
            self.mask = torch.cat([old, self._all_real(new) if mask is None else mask], dim=1)
        self.seen += new

    def _all_real(self, tokens: int) -> Tensor:
        first = self.layers[0]
        device = first.S.device if isinstance(first, KdaState) else first.latents.device
        return torch.ones(self.batch, tokens, dtype=torch.bool, device=device)

    def bytes(self) -> CacheBytes:
        """Bytes by kind, as counted from the tensors."""
        kda = [x for x in self.layers if isinstance(x, KdaState)]
        return CacheBytes(
            latent=sum(x.latents.nbytes for x in self.layers if isinstance(x, LatentCache)),
            state=sum(x.S.nbytes for x in kda),
            conv=sum(w.nbytes for x in kda for w in x.conv),
        )

    def nbytes(self) -> int:
        return self.bytes().total + (0 if self.mask is None else self.mask.nbytes)

    def copy(self) -> K3Cache:
        """An independent snapshot: state, windows, latents and position (to branch, or to roll back to)."""
        layers: list[KdaState | LatentCache] = [
            KdaState(x.S.clone(), tuple(w.clone() for w in x.conv))
            if isinstance(x, KdaState)
            else LatentCache(x.latents.clone())
            for x in self.layers
        ]
        return K3Cache(layers, self.seen, None if self.mask is None else self.mask.clone())
