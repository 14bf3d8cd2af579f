"""Latents in pages: who holds which page, and how a sequence finds its own.

    pool     pages of `page_size` tokens; a page has room in every MLA layer, and counts how many tables hold it
    table    for each sequence of a batch the numbers of its pages, in order: token t is in page table[t // page_size]

Sequences that begin alike hold the same pages. A page is written to by one table alone: who is about to write into a
page that others hold too gets a copy first (copy-on-write). Only pages that are begun are ever written to, so full
pages stay shared. Nothing is moved when a sequence grows.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from k3lite.budget import PAGE_SIZE, pages_of


class PoolFull(RuntimeError):
    """A pool of fixed size has too few free pages. Nothing was written when this is raised."""


class PagePool:
    """Room for latents in pages, shared by all caches that are made from it.

    layers: MLA layers.   width: numbers a token keeps in each (rank + rope).   page_size: tokens in a page.
    pages: how many there will ever be (room for all is taken at once), or None: it grows by the pages that are
    wanted, without moving those it has. Raises ValueError for sizes below 1 (pages: below 0).
    """

    def __init__(
        self, layers: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu",
        *, page_size: int = PAGE_SIZE, pages: int | None = None,
    ) -> None:  # fmt: skip
        if page_size < 1:
            raise ValueError(f"page_size: got {page_size}, wanted 1 token or more")
        if pages is not None and pages < 0:
            raise ValueError(f"pages: got {pages}, wanted 0 or more, or None for a pool that grows")
        self.layers, self.width, self.page_size, self.limit = layers, width, page_size, pages
        self.dtype, self.device = dtype, device
        self.slabs: list[Tensor] = []  # each [layers, pages * page_size, width]: pages that lie side by side
        self._first: list[int] = []  # number of each slab's first page
        self.holders: list[int] = []  # for each page, how many entries of tables name it
        self._free: list[int] = []  # a heap: low numbers are given out first, which keeps runs long
        if pages:
            self._grow(pages)

    @property
    def pages(self) -> int:
        """Pages there are, free ones too."""
        return len(self.holders)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all MLA layers together."""
        return self.layers * self.page_size * self.width * self.dtype.itemsize

    def nbytes(self) -> int:
        """Bytes of all pages, free ones too: the sum of the slabs."""
        return sum(slab.nbytes for slab in self.slabs)

    def take(self, count: int) -> list[int]:
        """Hold `count` free pages, in rising order. Raises PoolFull, and takes none, if a fixed pool has fewer."""
        if count > self.free:
            if self.limit is not None:
                raise PoolFull(f"{count} wanted, {self.free} of {self.pages} free")
            self._grow(count - self.free)
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self.hold(taken)
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each."""
        for page in pages:
            self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each; a page without any is free."""
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                heapq.heappush(self._free, page)

    def copy(self, source: int, target: int) -> None:
        """Write the latents of one page into another, in every layer."""
        self._run(target, 1).copy_(self._run(source, 1))

    def runs(self, layer: int, pages: Sequence[int]) -> list[Tensor]:
        """The pages of a sequence in one layer as few views [run * page_size, width]: neighbours in one run."""
        views, at = [], 0
        while at < len(pages):
            count = 1
            while at + count < len(pages) and pages[at + count] == pages[at] + count:
                count += 1
            views.append(self._run(pages[at], count)[layer])
            at += views[-1].shape[0] // self.page_size
        return views

    def _run(self, page: int, count: int) -> Tensor:
        """[layers, run * page_size, width]: `page` and what follows it in its slab, at most `count` pages."""
        index = bisect_right(self._first, page) - 1
        at = (page - self._first[index]) * self.page_size
        return self.slabs[index][:, at : at + count * self.page_size]

    def _grow(self, count: int) -> None:
        slab = torch.empty(self.layers, count * self.page_size, self.width, dtype=self.dtype, device=self.device)
        self.slabs.append(slab)
        self._first.append(self.pages)
        for page in range(self.pages, self.pages + count):
            heapq.heappush(self._free, page)
        self.holders += [0] * count


class PageTable:
    """Where the tokens of a batch are: table [B, pages of each sequence] int32, and `tokens`, the same for all."""

    def __init__(self, pool: PagePool, batch: int) -> None:
        self.pool, self.tokens = pool, 0
        self.table = torch.zeros(batch, 0, dtype=torch.int32)
        self._views: dict[int, list[list[Tensor]]] = {}  # by layer: the runs of each sequence

    def __del__(self) -> None:
        if hasattr(self, "table"):
            self.pool.release(self.table.flatten().tolist())

    def reserve(self, new: int) -> None:
        """Make room for `new` more tokens in each sequence: own copies of shared pages that are begun, and new pages.

        Raises PoolFull, and changes nothing, if the pool has too few pages.
        """
        pool, (batch, held) = self.pool, self.table.shape
        wanted = pages_of(self.tokens + new, pool.page_size) if pool.layers else 0
        copied = self._shared(self.tokens // pool.page_size) if new else []  # begun, and somebody else's too
        more = wanted - held
        try:
            taken = pool.take(len(copied) + batch * more)
        except PoolFull as e:
            mine = len(set(self.table.flatten().tolist()))
            raise PoolFull(
                f"pages: {e} (for {batch} x {new} more tokens after {self.tokens}, pages of {pool.page_size}). This cache "
                f"holds {mine} pages, other caches and snapshots {pool.pages - pool.free - mine} more; free() or "
                "rollback() of any of them frees pages, or make the pool larger: new_cache(pages=...)"
            ) from None
        if taken:
            self._views.clear()
        self._copy(copied, taken[: len(copied)])
        if more:
            added = torch.tensor(taken[len(copied) :], dtype=torch.int32).view(batch, more)
            self.table = torch.cat([self.table, added], dim=1)
        self.tokens += new

    def _shared(self, first: int) -> list[tuple[int, int]]:
        """Entries (row, column) from column `first` on whose page another entry names too; the last needs no copy."""
        left, entries = Counter(), []
        for row, pages in enumerate(self.table[:, first:].tolist()):
            for column, page in enumerate(pages, first):
                if self.pool.holders[page] - left[page] > 1:
                    left[page] += 1
                    entries.append((row, column))
        return entries

    def _copy(self, entries: list[tuple[int, int]], targets: list[int]) -> None:
        for entry, page in zip(entries, targets, strict=True):
            shared = int(self.table[entry])
            self.pool.copy(shared, page)
            self.pool.release([shared])
            self.table[entry] = page

    def overwrite(self, layer: int, latents: Tensor) -> None:
        """Replace all latents of one layer by [B,tokens,width], in copies of the pages that others hold too."""
        entries = self._shared(0)
        self._copy(entries, self.pool.take(len(entries)))
        self._views.clear()
        self.write(layer, latents)

    def write(self, layer: int, latents: Tensor) -> None:
        """Store latents [B,T,width] as those of the last T tokens that `reserve` made room for."""
        start = self.tokens - latents.shape[1]
        for row, runs in zip(latents.detach(), self._runs(layer), strict=True):
            end = self.table.shape[1] * self.pool.page_size
            for run in reversed(runs):
                first = end - run.shape[0]  # the token at which this run begins
                low, high = max(first, start), min(end, self.tokens)
                run[low - first : high - first] = row[low - start : high - start]
                if first <= start:
                    break
                end = first

    def pieces(self, layer: int) -> list[list[Tensor]]:
        """The latents of each sequence in order, as views [n,width] of the runs of pages that hold them."""
        spare = self.table.shape[1] * self.pool.page_size - self.tokens
        return [
            [*runs[:-1], runs[-1][: runs[-1].shape[0] - spare]] if runs and spare else runs
            for runs in self._runs(layer)
        ]

    def select(self, rows: Sequence[int]) -> PageTable:
        """A table of these sequences, in this order, holding the same pages. A row may come several times."""
        other = PageTable(self.pool, 0)
        other.table, other.tokens = self.table[list(rows)], self.tokens
        self.pool.hold(other.table.flatten().tolist())
        return other

    @classmethod
    def joined(cls, tables: Sequence[PageTable]) -> PageTable:
        """A table of all these sequences, holding the same pages; they are of one pool and have equally many tokens."""
        other = cls(tables[0].pool, 0)
        other.table, other.tokens = torch.cat([t.table for t in tables]), tables[0].tokens
        other.pool.hold(other.table.flatten().tolist())
        return other

    def adopt(self, other: PageTable) -> None:
        """Hold what `other` holds, and nothing else any more."""
        self.pool.hold(other.table.flatten().tolist())
        self.pool.release(self.table.flatten().tolist())
        self.table, self.tokens = other.table.clone(), other.tokens
        self._views.clear()

    def held(self) -> int:
        """Pages that these sequences hold, one that several share counted once."""
        return len(self.table.unique())

    def unused(self) -> int:
        """Slots in these pages that hold no token: what rounding up to pages costs, in tokens."""
        full = self.tokens // self.pool.page_size
        begun = len(self.table[:, full:].unique())
        return begun * (self.pool.page_size - self.tokens % self.pool.page_size)

    def _runs(self, layer: int) -> list[list[Tensor]]:
        if layer not in self._views:
            self._views[layer] = [self.pool.runs(layer, pages) for pages in self.table.tolist()]
        return self._views[layer]
