"""The device functions that every kernel shares: rounding, the gate, the norm. Each against torch or float64."""

import math

import pytest
import torch
import triton
import triton.language as tl

from specstate.kernels.portable import _TRITON_DTYPES
from specstate.kernels.triton_common import inverse_norm, log_decay, num_record_tiles, rounded
from specstate.validation import DTYPES
from tests.kernels.harness import ROUNDOFF, bytes_of

BLOCK = 256


@triton.jit
def _round_kernel(p_in, p_out, size, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = rounded(tl.load(p_in + offsets, mask=offsets < size, other=0.0), DTYPE)
    tl.store(p_out + offsets, x.to(p_out.dtype.element_ty), mask=offsets < size)


@triton.jit
def _gate_kernel(p_in, p_bias, p_rate, p_out, size, lower_bound, BOUNDED: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    raw = tl.load(p_in + offsets, mask=mask, other=0.0)
    g = log_decay(raw, tl.load(p_bias), tl.load(p_rate), lower_bound, BOUNDED)
    tl.store(p_out + offsets, g, mask=mask)


@triton.jit
def _norm_kernel(p_in, p_out, size, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(p_out + offsets, inverse_norm(tl.load(p_in + offsets, mask=offsets < size)), mask=offsets < size)


@triton.jit
def _tiles_kernel(p_in, p_out, size, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(p_out + offsets, num_record_tiles(tl.load(p_in + offsets, mask=offsets < size)), mask=offsets < size)


def float32_of(bits: list[int]) -> torch.Tensor:
    return torch.tensor([b - 2**32 if b >= 2**31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def around(bits: int) -> list[int]:
    return [bits - 1, bits, bits + 1]


SOURCES = {
    "random": torch.randn(4096, generator=torch.Generator().manual_seed(0)),
    "every exponent": torch.randn(4096, generator=torch.Generator().manual_seed(1))
    * 2.0 ** torch.linspace(-140, 127, 4096),
    # A value halfway between two neighbours goes to the even one; the bit below or above decides otherwise.
    "ties": float32_of([i for base in (0x3F808000, 0xBF808000) for j in range(64) for i in around(base + (j << 16))]),
    "subnormal": float32_of([i * 0x1FFF for i in range(1, 1024)] + [0x80000000 + i * 0x1FFF for i in range(1, 1024)]),
    "overflow": float32_of([0x7F7F0000 + i * 0x1111 for i in range(15)] + [0x477FE000 + i * 0x200 for i in range(32)]),
    "inf and zero": float32_of([0x7F800000, 0xFF800000, 0x00000000, 0x80000000]),
}  # fmt: skip
NANS = float32_of([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7F80FFFF])


def rounded_by_kernel(x: torch.Tensor, dtype: str, stored: torch.dtype, device: str) -> torch.Tensor:
    got = torch.zeros(len(x), dtype=stored, device=device)
    kind = _TRITON_DTYPES[DTYPES[dtype]]
    _round_kernel[(triton.cdiv(len(x), BLOCK),)](x.to(device), got, len(x), DTYPE=kind, BLOCK=BLOCK)
    return got.cpu()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_is_that_of_torch(dtype: str, source: str, device: str) -> None:
    x = SOURCES[source]
    got = rounded_by_kernel(x, dtype, torch.float32, device)
    assert torch.equal(bytes_of(got), bytes_of(x.to(DTYPES[dtype]).float()))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounded_values_are_stored_as_they_are(dtype: str, source: str, device: str) -> None:
    x = SOURCES[source]
    if dtype == "bfloat16":  # of smaller ones the interpreter's conversion makes others, below 2^-126 too
        x = x[(x.abs() >= 2.0**-126) | (x == 0.0)]
    got = rounded_by_kernel(x, dtype, DTYPES[dtype], device)
    assert torch.equal(bytes_of(got), bytes_of(x.to(DTYPES[dtype])))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_keeps_nan(dtype: str, device: str) -> None:
    """Whatever the payload: NaN is what an integer carry could turn into zero, and a cut into infinity."""
    assert rounded_by_kernel(NANS, dtype, DTYPES[dtype], device).isnan().all()


@pytest.mark.parametrize("rate", [0.05, 1.0, 16.0])
@pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus gate", "bounded gate"])
def test_gate_is_relatively_exact(bound: float | None, rate: float, device: str) -> None:
    """From the weakest to the strongest decay, x from -30 to 30, against float64.

    The error of x itself (rounded once, |x| times) is magnified by the exponential; beside that, an exponential, a
    series or quotient and two products, some roundings each.
    """
    raw, bias = torch.linspace(-30, 30, 1001), torch.tensor([0.37])
    scale = torch.tensor([rate])
    got = torch.full((1001,), torch.nan, device=device)
    given = (raw.to(device), bias.to(device), scale.to(device), got, 1001, bound or 0.0)
    _gate_kernel[(triton.cdiv(1001, BLOCK),)](*given, BOUNDED=bound is not None, BLOCK=BLOCK)
    x, wide = raw.double() + bias.double(), scale.double()
    if bound is None:
        want, slope = -wide * (x.clamp(min=0) + torch.log1p((-x.abs()).exp())), x.abs()
    else:
        want, slope = bound / (1 + (-wide * x).exp()), (wide * x).abs()
    error = ((got.cpu().double() - want) / want).abs()
    normal = want.abs() > 2.0**-120  # below, float32 has fewer bits
    assert (error <= (8 + 4 * slope) * ROUNDOFF["float32"])[normal].all()
    assert (got <= 0).all()
    assert bound is None or (got >= bound * (1 + 4 * ROUNDOFF["float32"])).all()


def test_inverse_norm_is_correctly_rounded(device: str) -> None:
    squares = torch.cat([torch.zeros(1), 10.0 ** torch.linspace(-12, 12, 200)])
    got = torch.full((len(squares),), torch.nan, device=device)
    _norm_kernel[(1,)](squares.to(device), got, len(squares), BLOCK=BLOCK)
    want = (squares + 1e-6).double().rsqrt()
    # The sum, the root and the quotient round once each; the sum's counts half behind a root.
    torch.testing.assert_close(got.cpu().double(), want, rtol=2 * ROUNDOFF["float32"], atol=0.0)


def test_tiles_cover_all_records_and_the_gap_before_them(device: str) -> None:
    counts = torch.arange(0, 100, dtype=torch.int32)
    got = torch.full_like(counts, -1).to(device)
    _tiles_kernel[(1,)](counts.to(device), got, len(counts), BLOCK=128)
    assert got.tolist() == [0 if n == 0 else math.ceil((n + 1) / 16) for n in counts.tolist()]
