"""Products with public gradients: as the matrix says, and exact in blocks, so that no order of summation shows."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from operator import add

import pytest
import torch
from torch import Tensor

from privlora.coordinates.public_span import PublicGradients, Rows, Span
from privlora.errors import DataError

BLOCK = 2048
P = 2 * BLOCK + 77
STORED = [torch.float32, torch.bfloat16, torch.float64]
by_dtype = pytest.mark.parametrize("dtype", STORED)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def uneven(rows: int, columns: int = P, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Entries over eight orders of magnitude and rows over six, as near to the edge of a grid as not."""
    sizes = 10.0 ** (-8 * torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed + 1)))
    return (randn(rows, columns, seed=seed) * sizes * 10.0 ** torch.linspace(-3, 3, rows)[:, None]).to(dtype)


def test_products_are_those_of_the_matrix() -> None:
    g, h, z = randn(5, P), randn(3, P, seed=1), randn(5, seed=2)
    found = PublicGradients(g)
    torch.testing.assert_close(found.gram(), g @ g.T, rtol=1e-13, atol=1e-11)
    assert torch.equal(found.gram(), found.gram().mT)
    torch.testing.assert_close(found.times(h), h @ g.T, rtol=1e-13, atol=1e-10)
    torch.testing.assert_close(found.combined(z), g.T @ z, rtol=1e-13, atol=1e-13)
    assert found.times(h[:0]).shape == (0, 5)
    few = g[[0, 3]].clone()
    found.keep([0, 3])
    assert torch.equal(found.matrix, few)
    torch.testing.assert_close(found.gram(), few @ few.T, rtol=1e-13, atol=1e-11)
    torch.testing.assert_close(found.times(h), h @ few.T, rtol=1e-13, atol=1e-10)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_what_is_kept_is_the_gradient_to_its_precision(dtype: torch.dtype, error: float) -> None:
    g, h = uneven(4), uneven(3, seed=5)
    exact_gram, exact = g.double() @ g.double().T, h.double() @ g.double().T
    found = PublicGradients(g.to(dtype))
    sizes = g.double().norm(dim=1)
    assert float(((found.gram() - exact_gram) / sizes / sizes[:, None]).abs().max()) < error
    relative = (found.times(h) - exact) / sizes / h.double().norm(dim=1, keepdim=True)
    assert float(relative.abs().max()) < error
    kept = found.matrix.clone()
    assert torch.equal(PublicGradients(found.matrix).matrix, kept)  # what was rounded stays


def test_sums_of_a_block_are_exact() -> None:
    """Against whole numbers of any length: float64 would round such a sum at each of its 2048 terms."""
    generator = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, (2, BLOCK), generator=generator) * 2.0 - 1
    # Rows and units of largest entries and odd last bits, all of one sign, and of signs that cancel.
    rows = (2.0**24 - torch.randint(1, 64, (2, BLOCK), generator=generator)) * signs / 2**24
    units = (2.0**18 - torch.randint(1, 64, (2, BLOCK), generator=generator)) * signs / 2**18
    exact = [[float(sum(map(_product, a.tolist(), b.tolist()))) for b in rows] for a in units]
    for blocks in (1, 32):  # whose sums are then added one by one
        g, h = rows.repeat(1, blocks), units.repeat(1, blocks)
        found = PublicGradients(g.float()).times(h.float())
        assert found.tolist() == [[reduce(add, [s] * blocks) for s in row] for row in exact]


def _product(a: float, b: float) -> Fraction:
    return Fraction(a) * Fraction(b)


@by_dtype
def test_no_bit_depends_on_the_order_of_summation(dtype: torch.dtype) -> None:
    g, h = uneven(6, BLOCK, dtype=dtype), uneven(5, BLOCK, seed=8, dtype=dtype)
    found = PublicGradients(g.clone()).times(h)
    assert float(found.abs().min()) > 0
    for seed in range(6):
        order = torch.randperm(BLOCK, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(PublicGradients(g[:, order].contiguous()).times(h[:, order]), found)


@by_dtype
def test_nobodys_products_depend_on_the_company(dtype: torch.dtype) -> None:
    """However many there are, of whatever size, wherever one stands, and however its memory is aligned."""
    found = PublicGradients(uneven(7, dtype=dtype))
    h = uneven(1, seed=4, dtype=dtype)
    alone = found.times(h)
    others = uneven(40, seed=6, dtype=dtype)
    others[1], others[2, 5] = float("nan"), float("inf")
    for count in (1, 2, 3, 8, 17, 40):
        for place in {0, 1, count // 2, count}:
            together = torch.cat([others[:place], h, others[place:count]])
            assert torch.equal(found.times(together)[place], alone[0])
    for shift in (1, 3, 5):  # of memory that begins between two vectors of a processor
        moved = torch.empty(P + shift, dtype=dtype)[shift:].copy_(h[0])
        assert torch.equal(found.times(moved[None]), alone)


@pytest.mark.parametrize(
    "widths", [[P], [1, 3000, 1100, P - 4101], [BLOCK, BLOCK, 77], [70] * 59 + [P - 4130]]
)
def test_units_are_read_where_they_lie(widths: list[int]) -> None:
    """As if they lay end to end, to the bit, wherever one piece ends."""
    found = PublicGradients(uneven(6))
    h = uneven(4, seed=4)
    rows = Rows(h.split(widths, dim=1), 0.5)
    assert len(rows) == 4
    assert torch.equal(found.times(rows), found.times(h) * 0.5)
    assert torch.equal(rows.joined(), h.double() * 0.5)


def test_rounding_in_float32_is_that_in_float64() -> None:
    """Of numbers of any size that float32 holds, also those that it hardly holds."""
    g = uneven(9, BLOCK + 5) * 10.0 ** torch.linspace(-42, 34, 9)[:, None]
    g[3, :7] = torch.tensor([1.0, 1 - 2**-24, 2**-24, -(2**-25), 3 * 2**-25, 2**-40, 0.0]) * g[3].abs().max()
    found = PublicGradients(g.clone()).matrix.double()
    for block, rounded in zip(g.double().split(BLOCK, dim=1), found.split(BLOCK, dim=1), strict=True):
        exponents = torch.frexp(block.abs().amax(dim=1, keepdim=True)).exponent.clamp(min=-100) - 24
        step = 2.0 ** exponents.double()
        assert torch.equal(rounded, (block / step).round() * step)


def test_a_unit_that_is_no_number_gives_none() -> None:
    found = PublicGradients(randn(4, P, dtype=torch.float32))
    h = randn(5, P, seed=1)
    h[1, 7], h[2, -1], h[3], h[4] = float("nan"), float("-inf"), 1e300, 0.0
    products = found.times(h)
    assert [bool(row.isfinite().all()) for row in products] == [True, False, False, False, True]
    assert bool(products[1:4].isnan().all())
    assert not products[4].any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), 1e200])
def test_a_matrix_that_is_no_number_spans_nothing(wrong: float) -> None:
    g = randn(3, P)
    g[1, BLOCK + 5] = wrong
    with pytest.raises(DataError, match="no direction is spanned"):
        PublicGradients(g)
    with pytest.raises(DataError, match="no direction is spanned"):
        PublicGradients(torch.zeros(2, 10))


@pytest.mark.parametrize(("scale", "copies"), [(1.0, 1e-3), (10.0, 1e-3), (10.0, 1e-5), (30.0, 1e-4)])
def test_near_copies_are_told_apart(scale: float, copies: float) -> None:
    """Half of the texts nearly copies of the others: the coefficients that float64 finds, with a ridge of 1e-6."""
    first = randn(20, 14_336) / 14_336**0.5
    near = first + copies * randn(20, 14_336, seed=1) / 14_336**0.5
    g = scale * torch.cat([first, near]).float().double()
    h = randn(5, 14_336, seed=2) / 14_336**0.5 + 0.3 * g[:5] / scale
    k = g @ g.T
    z = torch.linalg.solve(k + 1e-6 * torch.eye(40).double(), g @ h.T)
    span = Span(PublicGradients(g.float()), ridge=1e-6 * 40 / float(k.trace()), top_k=0)
    found = (span.vectors @ span.along(h, -1.0).mT).mT
    cosines = torch.nn.functional.cosine_similarity(found, z.mT, dim=1)
    assert float(cosines.min()) > 0.999
