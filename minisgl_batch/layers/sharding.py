"""Which attention heads and how much of a dimension each tensor-parallel rank holds. Knows nothing of torch.

Called by the layers' constructors, and by `models.config` to refuse a group size before any process starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_batch.errors import InvalidParameterError


@dataclass(frozen=True)
class HeadShard:
    """The attention heads of one rank: query heads [q_start, q_start + num_heads), likewise for the KV heads."""

    q_start: int
    num_heads: int
    kv_start: int
    num_kv_heads: int


def shard_heads(num_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadShard:
    """The heads of `rank` in a group of `size`.

    Query heads are split evenly. KV heads too while there are enough; beyond that neighbouring ranks hold copies of
    one KV head, the one that their query heads attend to.

    Raises:
        InvalidParameterError: the heads can't be split so; lists the sizes that work.
    """
    check_tp_size(size, num_heads, num_kv_heads)
    return HeadShard(
        q_start=rank * num_heads // size,
        num_heads=num_heads // size,
        kv_start=rank * num_kv_heads // size,
        num_kv_heads=max(1, num_kv_heads // size),
    )


def check_tp_size(size: int, num_heads: int, num_kv_heads: int, *widths: int) -> None:
    """Refuse a group size that these heads and other evenly split dimensions don't allow.

    Raises:
        InvalidParameterError: lists the sizes that work.
    """
    valid = [s for s in range(1, num_heads + 1) if _fits(s, num_heads, num_kv_heads, *widths)]
    if size not in valid:
        raise InvalidParameterError(
            "tp",
            f"{size} ranks can't share {num_heads} query heads and {num_kv_heads} KV heads"
            + "".join(f", and a width of {width}" for width in widths)
            + f"; valid sizes: {', '.join(map(str, valid))}",
        )


def even_share(width: int, size: int) -> int:
    """`width / size`, for a dimension that is split evenly.

    Raises:
        InvalidParameterError: it doesn't divide.
    """
    if width % size:
        raise InvalidParameterError("tp", f"a dimension of {width} can't be split evenly over {size} ranks")
    return width // size


def _fits(size: int, num_heads: int, num_kv_heads: int, *widths: int) -> bool:
    kv_fits = num_kv_heads % size == 0 or size % num_kv_heads == 0
    return num_heads % size == 0 and kv_fits and all(width % size == 0 for width in widths)
