"""Bin packing: items of integer size into bins of one capacity."""

from collections.abc import Sequence


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the items of each bin: largest first, each into the first bin with room. O(n log n).

    A tournament tree over the room left in each bin finds the first that fits. Ties keep the order of the input.
    Uses at most 11/9 of the fewest bins plus 6/9 (Dosa 2007).

    Raises:
        ValueError: an item is larger than a bin.
    """
    if not sizes:
        return []
    if max(sizes) > capacity:
        raise ValueError(f"an item of size {max(sizes)} is larger than a bin of {capacity}")
    most_bins = min(len(sizes), 2 * sum(sizes) // capacity + 1)  # any two bins hold more than one capacity together
    width = 1
    while width < most_bins:
        width *= 2
    room = [capacity] * (2 * width)
    bins: list[list[int]] = [[] for _ in range(width)]
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size, node = sizes[item], 1
        while node < width:
            node *= 2
            if room[node] < size:
                node += 1
        bins[node - width].append(item)
        room[node] -= size
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            most = left if left > right else right
            if room[node] == most:
                break  # so it is above
            room[node] = most
    return [items for items in bins if items]
