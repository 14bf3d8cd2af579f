"""What a sequence carries from one token to the next: a fixed state per KDA layer, pages of latents for the MLA layers.

States and convolution windows are never written in place: a step replaces them. Latents are written into pages
(`pages.py`), each slot once; a page that somebody else holds too is copied before it is written to. So a copy of a
cache stays what it was, whatever happens to the cache. No gradient flows through cached latents.

`bytes()` counts what the tokens take, as `budget.cache_bytes` predicts; `nbytes()` what is held for them: whole pages
and tables, as `budget.paged_cache_bytes` predicts. (Padding masks come on top, for padded batches only: a byte a token.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from k3lite.budget import PAGE_SIZE, CacheBytes, PagedCacheBytes
from k3lite.config import K3Config, LayerKind
from k3lite.pages import PagePool, PageTable


@dataclass
class KdaState:
    """One KDA layer: S [B,H,K,V] in fp32, and for q, k and v the last W-1 inputs of the convolution [B,W-1,H*K]."""

    S: Tensor
    conv: tuple[Tensor, Tensor, Tensor]

    def select(self, rows: Sequence[int]) -> KdaState:
        """These sequences of the batch, as copies."""
        rows = list(rows)
        return KdaState(self.S[rows], tuple(w[rows] for w in self.conv))

    @classmethod
    def joined(cls, states: Sequence[KdaState]) -> KdaState:
        """All of these sequences in one batch, as copies."""
        conv = zip(*(x.conv for x in states), strict=True)
        return cls(torch.cat([x.S for x in states]), tuple(torch.cat(windows) for windows in conv))


@dataclass
class LatentCache:
    """One MLA layer: a slot of rank + rope numbers for each token, in the pages that the whole cache holds."""

    pages: PageTable
    layer: int  # counts MLA layers only

    def append(self, new: Tensor) -> list[list[Tensor]]:
        """Store new [B,T,rank+rope], for which the cache was extended; return all, as `latent_attention` takes them."""
        self.pages.write(self.layer, new)
        return self.pages.pieces(self.layer)

    @property
    def latents(self) -> Tensor:
        """All of them in one tensor [B,L,rank+rope]: a copy. Assigning to it replaces them, for experiments."""
        pool, rows = self.pages.pool, self.pages.pieces(self.layer)
        nothing = torch.zeros(0, pool.width, dtype=pool.dtype, device=pool.device)
        return torch.stack([torch.cat([nothing, *pieces]) for pieces in rows])

    @latents.setter
    def latents(self, new: Tensor) -> None:
        if new.shape != self.latents.shape:
            raise ValueError(f"latents: got shape {tuple(new.shape)}, wanted {tuple(self.latents.shape)}")
        self.pages.overwrite(self.layer, new)


@dataclass
class K3Cache:
    """The hybrid cache of a batch of sequences."""

    layers: list[KdaState | LatentCache]
    pages: PageTable
    mask: Tensor | None = None  # [B, seen], False for padding; None while there was none

    @classmethod
    def empty(
        cls, config: K3Config, batch: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        *, pages: int | None = None, page_size: int = PAGE_SIZE,
    ) -> K3Cache:  # fmt: skip
        """Before the first token. dtype is that of latents and convolution inputs; states are fp32 (fp64 if it is).

        pages: how many there are of `page_size` tokens each, for all sequences together; None: as many as it takes.
        """
        pool = PagePool(config.num_mla_layers, config.latent_width, dtype, device, page_size=page_size, pages=pages)
        a, window = config.linear_attn_config, config.linear_attn_config.short_conv_kernel_size - 1
        S = torch.zeros(
            batch, a.num_heads, a.head_dim, a.head_dim, device=device,
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
        )  # fmt: skip
        conv = torch.zeros(batch, window, config.kda_width, dtype=dtype, device=device)
        states = [KdaState(S, (conv, conv, conv)) if kind == "kda" else None for kind in config.layer_kinds]
        return cls._of(states, PageTable(pool, batch))

    @classmethod
    def _of(cls, states: list[KdaState | None], pages: PageTable, mask: Tensor | None = None) -> K3Cache:
        """states: one for each layer, None where it is an MLA layer."""
        mla = iter(range(len(states)))
        return cls([LatentCache(pages, next(mla)) if s is None else s for s in states], pages, mask)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, like K3Config.layer_kinds."""
        return tuple("kda" if isinstance(x, KdaState) else "mla" for x in self.layers)

    @property
    def batch(self) -> int:
        return self.pages.table.shape[0]

    @property
    def seen(self) -> int:
        """Tokens so far, padding included."""
        return self.pages.tokens

    def extend(self, new: int, mask: Tensor | None = None) -> None:
        """Before a forward pass: make room for `new` tokens and remember which of them are real.

        mask: [B, new] bool, or None if all are. Raises PoolFull, and changes nothing, where pages run out.
        """
        before = self.seen
        self.pages.reserve(new)
        if mask is not None or self.mask is not None:
            old = self._all_real(before) if self.mask is None else self.mask
            self.mask = torch.cat([old, self._all_real(new) if mask is None else mask], dim=1)

    def _all_real(self, tokens: int) -> Tensor:
        return torch.ones(self.batch, tokens, dtype=torch.bool, device=self.pages.pool.device)

    # ---- bytes

    def bytes(self) -> CacheBytes:
        """Bytes that the tokens take by kind, each sequence counted as if it were alone."""
        pool = self.pages.pool
        kda = [x for x in self.layers if isinstance(x, KdaState)]
        return CacheBytes(
            latent=self.batch * self.seen * pool.layers * pool.width * pool.dtype.itemsize,
            state=sum(x.S.nbytes for x in kda),
            conv=sum(w.nbytes for x in kda for w in x.conv),
        )

    def reserved(self) -> PagedCacheBytes:
        """Bytes that are held by kind: pages, those that sequences share counted once, and their table."""
        used, pages = self.bytes(), self.pages
        return PagedCacheBytes(pages.held() * pages.pool.page_bytes, used.state, used.conv, pages.table.nbytes)

    def nbytes(self) -> int:
        """Bytes of all tensors that this cache holds. What it shares with other caches is in theirs too."""
        return self.reserved().total + (0 if self.mask is None else self.mask.nbytes)

    def unused_bytes(self) -> int:
        """Bytes of the pages held that hold no token: the price of pages."""
        return self.pages.unused() * self.pages.pool.page_bytes // self.pages.pool.page_size

    # ---- copies, snapshots, freeing

    def copy(self) -> K3Cache:
        """An independent snapshot: state, windows, latents and position (to branch, or to roll back to).

        Latents are shared page by page until one of the two writes; the rest is copied. A snapshot that is no longer
        needed gives its pages back when it is forgotten, or at once by `free()`.
        """
        return self.select(range(self.batch))

    def select(self, rows: Sequence[int]) -> K3Cache:
        """An independent cache of these sequences, in this order; a sequence that comes twice shares its pages.

        Raises IndexError for a row that is not there.
        """
        states = [x.select(rows) if isinstance(x, KdaState) else None for x in self.layers]
        return self._of(states, self.pages.select(rows), None if self.mask is None else self.mask[list(rows)])

    def fork(self, times: int) -> K3Cache:
        """A batch in which each of these sequences comes `times` times, side by side, to go on in different ways.

        What was read once is not read again: full pages stay shared by all, the page that is begun is copied by whoever
        writes to it, the states are copied now. This cache stays as it is. Raises ValueError for less than once.
        """
        if times < 1:
            raise ValueError(f"times: got {times}, wanted 1 or more")
        return self.select([row for row in range(self.batch) for _ in range(times)])

    def pause(self, tokens: int) -> None:
        """Go on by `tokens` tokens of padding without a forward pass: slots of zeros that nobody looks at.

        States and windows stay, so the next token follows the last real one. Raises PoolFull, and changes nothing,
        where pages run out, and ValueError for less than 0.
        """
        if tokens < 0:
            raise ValueError(f"tokens: got {tokens}, wanted 0 or more")
        if tokens == 0:
            return
        pool = self.pages.pool
        self.extend(tokens, ~self._all_real(tokens))
        for layer in range(pool.layers):
            self.pages.write(layer, torch.zeros(self.batch, tokens, pool.width, dtype=pool.dtype, device=pool.device))

    @classmethod
    def joined(cls, caches: Sequence[K3Cache]) -> K3Cache:
        """One batch of the sequences of all these caches, which have seen equally many tokens (see `pause`).

        They stay as they are and share their pages with it. Raises ValueError for none, for caches of different pools
        (take `fork` or `another` of one), for different lengths.
        """
        if not caches:
            raise ValueError("caches: got none, wanted at least one")
        if any(c.pages.pool is not caches[0].pages.pool for c in caches):
            raise ValueError("caches: got caches with different pages, wanted forks of one, or another() beside one")
        lengths = sorted({c.seen for c in caches})
        if len(lengths) > 1:
            raise ValueError(f"caches: got {lengths} tokens, wanted equally many; the shorter can pause()")
        layers = zip(*(c.layers for c in caches), strict=True)
        states = [KdaState.joined(same) if isinstance(same[0], KdaState) else None for same in layers]
        masks = [c._all_real(c.seen) if c.mask is None else c.mask for c in caches]
        mask = None if all(c.mask is None for c in caches) else torch.cat(masks)
        return cls._of(states, PageTable.joined([c.pages for c in caches]), mask)

    def another(self, batch: int = 1) -> K3Cache:
        """An empty cache for other sequences of the same model, in the same pool of pages."""
        states = [
            KdaState(x.S.new_zeros(batch, *x.S.shape[1:]), tuple(w.new_zeros(batch, *w.shape[1:]) for w in x.conv))
            if isinstance(x, KdaState)
            else None
            for x in self.layers
        ]
        return self._of(states, PageTable(self.pages.pool, batch))

    def rollback(self, snapshot: K3Cache) -> None:
        """Be again what `snapshot`, a `copy()` of this cache, is: state, windows, latents and position together.

        Pages written since are free then. The snapshot stays what it is and can be used again. Raises ValueError for
        the cache of another pool or batch.
        """
        if snapshot.pages.pool is not self.pages.pool or snapshot.batch != self.batch:
            raise ValueError(
                f"snapshot: got a cache of batch {snapshot.batch}"
                f"{'' if snapshot.pages.pool is self.pages.pool else ' with other pages'}, "
                f"wanted a copy() of this one (batch {self.batch})"
            )
        self.pages.adopt(snapshot.pages)
        for mine, kept in zip(self.layers, snapshot.layers, strict=True):
            if isinstance(mine, KdaState):
                mine.S, mine.conv = kept.S.clone(), tuple(w.clone() for w in kept.conv)
        self.mask = None if snapshot.mask is None else snapshot.mask.clone()

    def free(self) -> None:
        """Give all pages back and begin anew: the cache is as empty as before its first token."""
        self.rollback(self.another(self.batch))
