"""Products with weights in FP8 for some number of rows, by cuBLASLt or in tiles of ours. Called by `matmul`."""

from __future__ import annotations

import torch

from minisgl_kernels.cublaslt import ALGORITHM_BYTES, CublasLtError, Product
from minisgl_kernels.fp8 import Fp8Matrix
from minisgl_kernels.fp8_tiles import Tiles, candidates, fp8_tiles


class Fp8Product:
    """As `cublaslt.Product`, with tiles among the algorithms; run on one stream.

    Args:
        num_rows: of x.
        weight: any of the shape, with a scale per row.

    Raises:
        OSError: there is no cuBLASLt, or one that is too old.
        CublasLtError: it doesn't work here.
    """

    def __init__(self, num_rows: int, weight: Fp8Matrix) -> None:
        values = weight.values
        self._shape = num_rows, weight.shape[0], weight.shape[1]
        self._product = Product(*self._shape, values.dtype, values.device, weight.dtype)
        self._arrivals = torch.zeros(len(weight), dtype=torch.int32, device=values.device)

    def candidates(self, workspace_bytes: int) -> list[bytes]:
        """cuBLASLt's own suggestions, if it has any, and tiles."""
        try:
            found = self._product.candidates(workspace_bytes)
        except CublasLtError:
            found = []
        return found + [tiles.to_bytes(ALGORITHM_BYTES) for tiles in candidates(*self._shape, workspace_bytes)]

    def check(self, algorithm: bytes, workspace_bytes: int) -> None:
        """As `cublaslt.Product.check`."""
        tiles = Tiles.from_bytes(algorithm)
        if tiles is None:
            self._product.check(algorithm, workspace_bytes)
        elif tiles.workspace_bytes(*self._shape[:2]) > workspace_bytes:
            raise CublasLtError("the parts of sums don't fit into the workspace")

    def run(
        self,
        algorithm: bytes,
        x: torch.Tensor | Fp8Matrix,
        weight: torch.Tensor | Fp8Matrix,
        out: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        """As `cublaslt.Product.run`."""
        assert isinstance(x, Fp8Matrix)
        assert isinstance(weight, Fp8Matrix)
        tiles = Tiles.from_bytes(algorithm)
        if tiles is None:
            self._product.run(algorithm, x, weight, out, workspace)
        else:
            fp8_tiles(x, weight, out, tiles, workspace, self._arrivals)
