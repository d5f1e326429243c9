"""Rows put into FP8, alone and by norms and activations, and products of matrices in FP8."""

from __future__ import annotations

import random

import pytest
import torch

from minisgl_kernels import reference, reference_fp8
from minisgl_kernels.activate_fp8 import activate_fp8
from minisgl_kernels.add_rms_norm import add_rms_norm_fp8
from minisgl_kernels.e4m3 import E4M3, E4M3_MAX
from minisgl_kernels.fp8 import GROUP_SIZE, Fp8Matrix
from minisgl_kernels.fp8_matmul import fp8_matmul
from minisgl_kernels.fp8_product import Fp8Product
from minisgl_kernels.fp8_tiles import Tiles, fp8_tiles
from minisgl_kernels.quantize_fp8 import quantize
from tests.kernels.errors import relative_error

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROUNDING = 2**-4  # of 3 bits behind the leading one


def random_rows(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows of very different sizes, the first of them all zero."""
    sizes = torch.logspace(-3, 2, num_rows, device=device)[torch.randperm(num_rows, device=device)]
    x = torch.randn(num_rows, size, device=device) * sizes.unsqueeze(1)
    x[0] = 0.0
    return x.to(dtype)


def assert_same(got: Fp8Matrix, want: Fp8Matrix) -> None:
    """Up to what rounds the other way."""
    assert got.values.dtype == E4M3
    assert got.shape == want.shape
    torch.testing.assert_close(got.scales, want.scales, atol=0.0, rtol=1e-2)  # an activation may round otherwise
    a, b = reference_fp8.dequantize(got), reference_fp8.dequantize(want)
    assert ((a - b).abs() <= 0.15 * b.abs() + 2**-8 * want.scales.amax(1, keepdim=True)).all()
    # Of the 8 bits of bfloat16 FP8 has 4, so up to 1 / 16 of the numbers lie halfway between two: multiplying by
    # the reciprocal of a scale, as some kernels do, rounds them another way than a division.
    assert ((a - b).abs() > 0.02 * b.abs()).sum() <= 1 + 0.1 * a.numel()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_near_what_they_were(dtype: torch.dtype, grouped: bool) -> None:
    """The twin itself, by what FP8 promises."""
    x = random_rows(7, 300, dtype, torch.device("cpu"))
    matrix = reference_fp8.quantize(x, grouped=grouped)
    assert matrix.scales.shape == (7, 3 if grouped else 1)
    error = (reference_fp8.dequantize(matrix) - x.float()).abs()
    smallest = 2**-10 * matrix.scales.repeat_interleave(GROUP_SIZE if grouped else 300, dim=1)[:, :300]  # half a step
    assert (error <= ROUNDING * x.float().abs() + smallest * 1.001).all()
    assert (matrix.values[1:].float().abs().amax(1) == E4M3_MAX).all()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize(device: torch.device, dtype: torch.dtype, grouped: bool) -> None:
    for size in (1024, 5120, 17408, 1000) if device.type == "cuda" else (random.randrange(2, 500), 256):
        num_rows = random.choice((2, 256, 5000)) if device.type == "cuda" else random.randrange(2, 5)
        wide = random_rows(num_rows, size + 16, dtype, device)
        assert_same(quantize(wide[:, 8:-8], grouped=grouped), reference_fp8.quantize(wide[:, 8:-8], grouped=grouped))
    assert quantize(wide[:0], grouped=grouped).scales.shape[0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_residual", [True, False])
def test_add_rms_norm_fp8(layer_device: torch.device, dtype: torch.dtype, has_residual: bool) -> None:
    for size in (
        (1024, 5120, 1000) if layer_device.type == "cuda" else (random.randrange(2, 70), 8 * random.randrange(1, 40))
    ):
        num_tokens = random.choice((1, 256, 5000)) if layer_device.type == "cuda" else random.randrange(1, 5)
        x, residual = random_rows(2 * num_tokens, size, dtype, layer_device).add_(0.01).chunk(2)
        weight = torch.randn(size, device=layer_device).to(random.choice((dtype, torch.float32)))
        twin, twin_stream = reference.add_rms_norm(x, residual.clone() if has_residual else None, weight, 1e-5)
        before = x.clone()
        normed, stream = add_rms_norm_fp8(x, residual if has_residual else None, weight, 1e-5)
        assert stream is (residual if has_residual else x)
        assert torch.equal(x, before)
        assert torch.equal(stream, twin_stream)
        assert_same(normed, reference_fp8.quantize(twin, grouped=False))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_activate_fp8(layer_device: torch.device, dtype: torch.dtype, gelu: bool) -> None:
    for width in (
        (3072, 17408, 1000)
        if layer_device.type == "cuda"
        else (random.randrange(2, 70), 8 * random.randrange(1, 300), 5000)
    ):
        num_tokens = random.choice((1, 256, 5000)) if layer_device.type == "cuda" else random.randrange(1, 4)
        gate_up = torch.randn(num_tokens, 2 * width, device=layer_device).mul_(3.0).to(dtype)
        twin = (reference.gelu_and_mul if gelu else reference.silu_and_mul)(gate_up)
        assert_same(activate_fp8(gate_up, gelu=gelu), reference_fp8.quantize(twin, grouped=False))


def random_operands(
    rows: int, out: int, size: int, dtype: torch.dtype, device: torch.device, *, grouped: bool
) -> tuple[Fp8Matrix, ...]:
    """x, and a weight whose scales lie as in layers."""
    x, weight = random_rows(rows, size, torch.float32, device), torch.randn(out, size, device=device) / size**0.5
    weight *= torch.logspace(-1, 1, out, device=device).unsqueeze(1)
    values, scales = (made := quantize(weight, grouped=grouped)).values, made.scales
    return quantize(x.to(dtype), grouped=grouped), Fp8Matrix(values, scales.T.contiguous().T, dtype)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(device: torch.device, dtype: torch.dtype, grouped: bool) -> None:
    shapes = [(random.randrange(2, 40), random.randrange(1, 150), random.randrange(2, 400))]
    if device.type == "cuda":
        sizes = (7168, 5120), (1024, 3072), (48, 272), (50, 270)
        shapes = [(m, n, k) for m in (2, 7, 64, 200, 3000) for n, k in sizes]
    for shape in shapes:
        x, weight = random_operands(*shape, dtype, device, grouped=grouped)
        exact = reference_fp8.dequantize(x).double() @ reference_fp8.dequantize(weight).double().T
        tolerance = 2e-3 if dtype == torch.float16 else 5e-3
        assert relative_error(fp8_matmul(x, weight), exact) < tolerance
        out = torch.full(exact.shape, torch.nan, dtype=dtype, device=device)
        assert fp8_matmul(x, weight, out) is out
        assert relative_error(out, exact) < tolerance
    assert fp8_matmul(Fp8Matrix(x.values[:0], x.scales[:0], dtype), weight).shape == (0, shape[1])


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_sums_in_parts(device: torch.device, splits: int) -> None:
    """By whoever comes last, who leaves the counters as they were."""
    num_rows, out_features = (300, 1000) if device.type == "cuda" else (random.randrange(17, 40), 70)
    operands = random_operands(num_rows, out_features, 16 * 20, torch.bfloat16, device, grouped=False)
    exact = reference_fp8.dequantize(operands[0]).double() @ reference_fp8.dequantize(operands[1]).double().T
    tiles = Tiles(32, 64, 64, splits, 4, 3)
    assert Tiles.from_bytes(tiles.to_bytes(64)) == tiles
    assert Tiles.from_bytes(bytes(64)) is None
    workspace = torch.empty(tiles.workspace_bytes(num_rows, out_features), dtype=torch.uint8, device=device)
    arrivals = torch.zeros(tiles.num_tiles(num_rows, out_features), dtype=torch.int32, device=device)
    for _ in range(2):
        out = torch.full((num_rows, out_features), torch.nan, dtype=torch.bfloat16, device=device)
        fp8_tiles(*operands, out, tiles, workspace, arrivals)
        assert relative_error(out, exact) < 5e-3
        assert not arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_candidate_multiplies(dtype: torch.dtype) -> None:
    device, workspace = torch.device("cuda", 0), torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    for shape in ((2, 7168, 5120), (64, 1024, 3072), (100, 1024, 2048), (256, 5120, 17408)):
        x, weight = random_operands(*shape, dtype, device, grouped=False)
        exact = reference_fp8.dequantize(x).double() @ reference_fp8.dequantize(weight).double().T
        product = Fp8Product(shape[0], weight)
        candidates = product.candidates(workspace.nbytes)
        assert any(Tiles.from_bytes(algorithm) for algorithm in candidates)
        for algorithm in candidates:
            out = torch.full(exact.shape, torch.nan, dtype=dtype, device=device)
            product.check(algorithm, workspace.nbytes)
            product.run(algorithm, x, weight, out, workspace)
            assert relative_error(out, exact) < 5e-3
