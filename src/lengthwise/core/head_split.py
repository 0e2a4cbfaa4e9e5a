"""How many heads, and which, each rank of a stage attends with where ranks trade tokens for heads."""

from collections.abc import Sequence

from lengthwise.core.pipeline_config import Method


def head_bounds(num_heads: int, num_kv_heads: int, *, degree: int) -> tuple[int, ...]:
    """Rank r of a stage attends with query heads ``bounds[r]`` to ``bounds[r + 1]`` where heads are split.

    By whole key/value groups where there are enough of them for everyone, else by query heads. Where ``degree`` does
    not divide, some ranks hold one more.
    """
    unit = num_heads // num_kv_heads if degree <= num_kv_heads else 1
    return tuple(rank * (num_heads // unit) // degree * unit for rank in range(degree + 1))


def shared_by(degree: int, methods: Sequence[Method]) -> tuple[Method, ...]:
    """The methods that differ where ``degree`` ranks share a layer: one rank is dense, a grid of a prime is a ring."""
    if degree == 1:
        return (Method.DENSE,)
    is_prime = all(degree % size for size in range(2, degree))
    is_twice = is_prime and {Method.RING, Method.ULYSSES_RING} <= set(methods)
    return tuple(method for method in methods if not (is_twice and method is Method.ULYSSES_RING))


def ulysses_degree(method: Method, degree: int, num_heads: int, num_kv_heads: int) -> int:
    """How many neighbouring ranks trade tokens for heads in an attention under ``method``; 1: none do.

    Of ``ulysses_ring``, the most that divide ``degree`` and, where that is possible, the heads, but not all ranks.
    """
    if method in (Method.ULYSSES, Method.ULYSSES_Z):
        return degree
    sizes = [size for size in range(1, degree) if degree % size == 0 and size <= num_heads]
    if method is not Method.ULYSSES_RING or not sizes:
        return 1
    return max(sizes, key=lambda size: (size > 1, num_kv_heads % size == 0, num_heads % size == 0, size))
