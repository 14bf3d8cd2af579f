"""Pages: who holds what, copy-on-write, a pool that is full, and that nothing moves when a sequence grows."""

import pytest
import torch

from k3lite.pages import PagePool, PageTable, PoolFull

WIDTH = 3


def pool_of(pages=None, page_size=4, layers=2):
    return PagePool(layers, WIDTH, torch.float64, page_size=page_size, pages=pages)


class Written(PageTable):
    """A table beside a plain copy of what each layer should hold."""

    def __init__(self, pool, batch):
        super().__init__(pool, batch)
        self.wanted = [torch.zeros(batch, 0, WIDTH, dtype=torch.float64) for _ in range(pool.layers)]

    def grow(self, new, seed=0):
        self.reserve(new)
        rng = torch.Generator().manual_seed(seed)
        for layer, old in enumerate(self.wanted):
            latents = torch.randn(len(old), new, WIDTH, generator=rng, dtype=torch.float64)
            self.write(layer, latents)
            self.wanted[layer] = torch.cat([old, latents], 1)
        return self

    def choose(self, rows):
        other = self.select(rows)
        other.__class__ = Written
        other.wanted = [x[list(rows)] for x in self.wanted]
        return other

    def check(self):
        for layer, wanted in enumerate(self.wanted):
            for row, pieces in zip(wanted, self.pieces(layer), strict=True):
                assert torch.equal(torch.cat(pieces) if pieces else row[:0], row)
        return self


def holders_are_counted(pool, *tables):
    """Every page has as many holders as tables name it, and is free if and only if it has none."""
    named = torch.cat([t.table.flatten() for t in tables]).long().bincount(minlength=pool.pages).tolist()
    assert named == pool.holders and pool.free == named.count(0)


@pytest.mark.parametrize("page_size", [1, 3, 4, 64])
@pytest.mark.parametrize("pages", [None, 200], ids=["grows", "fixed"])
def test_what_is_written_is_read(page_size, pages):
    pool = pool_of(pages, page_size)
    table = Written(pool, 3)
    for new in (5, 1, 1, 6, 8, 3, 1):
        table.grow(new, seed=new).check()
    assert table.tokens == 25 and table.table.shape == (3, -(-25 // page_size))
    holders_are_counted(pool, table)


def test_growing_moves_nothing():
    pool = pool_of()
    table = Written(pool, 2).grow(6)
    before = [piece.data_ptr() for pieces in table.pieces(1) for piece in pieces]
    table.grow(30)
    after = {piece.data_ptr() for pieces in table.pieces(1) for piece in pieces}
    assert set(before) <= after


def test_a_growing_pool_takes_the_pages_it_needs_and_no_more():
    pool = pool_of()
    table = Written(pool, 2).grow(5)
    assert pool.pages == 4 and pool.nbytes() == 4 * pool.page_bytes == 4 * 2 * 4 * WIDTH * 8
    del table
    assert pool.free == 4
    other = Written(pool, 1).grow(20).check()
    assert pool.pages == 5 and other.table.tolist() == [[0, 1, 2, 3, 4]], "free pages first, in rising order"


def test_neighbouring_pages_are_one_piece():
    pool = pool_of(pages=10)
    one = Written(pool, 1).grow(12)
    assert [len(p) for p in one.pieces(0)[0]] == [12]
    two = Written(pool, 1).grow(2)
    one.grow(5), two.grow(3)
    assert one.table.tolist() == [[0, 1, 2, 4, 5]] and two.table.tolist() == [[3, 6]]
    assert [len(p) for p in one.pieces(0)[0]] == [12, 5] and [len(p) for p in two.pieces(0)[0]] == [4, 1]
    one.check(), two.check()


def test_pages_out_of_order_after_free_and_reuse():
    pool = pool_of(pages=6)
    a, b, c = (Written(pool, 1).grow(4, seed=i) for i in range(3))
    del a
    c.grow(4)
    assert c.table.tolist() == [[2, 0]]
    c.check(), b.check()
    holders_are_counted(pool, b, c)


def test_sequences_that_begin_alike_share_full_pages_and_split_on_the_page_begun():
    pool = pool_of()
    prefix = Written(pool, 1).grow(10)
    batch = prefix.choose([0, 0, 0])
    assert pool.pages == 3 and pool.holders == [4, 4, 4]
    batch.grow(3, seed=1).check()
    rows = batch.table.tolist()
    assert [row[:2] for row in rows] == [[0, 1]] * 3 and len({row[2] for row in rows} | {2}) == 4
    prefix.check()
    holders_are_counted(pool, prefix, batch)
    assert batch.held() == 2 + 3 * 2 and batch.unused() == 3 * 3


def test_the_last_holder_writes_without_a_copy():
    pool = pool_of()
    table = Written(pool, 1).grow(6)
    batch = table.choose([0, 0])
    del table
    batch.grow(1, seed=1).check()
    assert pool.pages == 3 and sorted(batch.table[:, 1].tolist()) == [1, 2]


def test_a_full_page_is_never_copied():
    pool = pool_of()
    table = Written(pool, 1).grow(8)
    other = table.choose([0])
    other.grow(1, seed=1).check()
    assert pool.pages == 3 and table.table.tolist() == [[0, 1]] and other.table.tolist() == [[0, 1, 2]]


def test_a_full_pool_says_what_is_missing_and_changes_nothing():
    pool = pool_of(pages=4)
    table, other = Written(pool, 2).grow(6), None
    with pytest.raises(PoolFull, match=r"pages: 2 wanted, 0 of 4 free \(for 2 x 3 more tokens after 6, pages of 4\)"):
        table.reserve(3)
    assert table.tokens == 6 and table.table.shape == (2, 2)
    table.grow(2).check()  # what fits still fits
    other = table.choose([0])
    with pytest.raises(PoolFull, match=r"pages: 1 wanted.*This cache holds 2 pages.*snapshots 2 more; free\(\)"):
        other.reserve(1)
    other.check(), table.check()
    holders_are_counted(pool, table, other)


def test_no_copy_on_write_is_begun_that_cannot_be_finished():
    """Four pages: two sequences of one page and a half, copied. The copy wants two pages and there is one."""
    pool = pool_of(pages=5)
    table = Written(pool, 2).grow(6)
    copy = table.choose([0, 1])
    before = copy.table.clone()
    with pytest.raises(PoolFull):
        copy.reserve(1)
    assert torch.equal(copy.table, before) and pool.free == 1
    del table
    copy.grow(1, seed=1).check()  # now nobody else holds the pages


def test_overwriting_leaves_others_alone():
    pool = pool_of()
    table = Written(pool, 1).grow(6)
    copy = table.choose([0])
    copy.overwrite(1, torch.zeros(1, 6, WIDTH))
    copy.wanted[1] = torch.zeros(1, 6, WIDTH, dtype=torch.float64)
    copy.check(), table.check()


def test_without_mla_layers_no_page_is_held():
    pool = pool_of(pages=1, layers=0)
    table = PageTable(pool, 2)
    table.reserve(1000)
    assert (table.tokens, table.held(), table.unused(), pool.free) == (1000, 0, 0, 1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"page_size": 0}, "page_size: got 0, wanted 1 token or more"),
        ({"pages": -1}, "pages: got -1, wanted 0 or more"),
    ],
    ids=["page-size", "pages"],
)
def test_sizes_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        pool_of(**options)
