"""Bin packing: items of integer size into bins of one capacity."""

from collections.abc import Sequence


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the items of each bin: largest first, each into the first bin with room. O(n log n).

    A tournament tree over the room left in each bin finds the first that fits. Ties keep the order of the input.
    Uses at most 11/9 of the fewest bins plus 6/9 (Dosa 2007).

    Raises:
        ValueError: an item is larger than a bin.
    """
    if sizes and max(sizes) > capacity:
        raise ValueError(f"an item of size {max(sizes)} is larger than a bin of {capacity}")
    width = 1
    while width < len(sizes):
        width *= 2
    room = [capacity] * (2 * width)
    bins: list[list[int]] = [[] for _ in sizes]
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        node = 1
        while node < width:
            node *= 2
            if room[node] < sizes[item]:
                node += 1
        bins[node - width].append(item)
        room[node] -= sizes[item]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [items for items in bins if items]
