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
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    place = 0
    while place < len(order):
        size, node = sizes[order[place]], 1
        while node < width:
            node *= 2
            if room[node] < size:
                node += 1
        left, bin_items = room[node], bins[node - width]
        while place < len(order) and sizes[order[place]] == size <= left:  # equal ones fill the same bin first
            bin_items.append(order[place])
            left -= size
            place += 1
        room[node] = left
        while node > 1:
            node //= 2
            left_room, right_room = room[2 * node], room[2 * node + 1]
            larger_room = left_room if left_room > right_room else right_room
            if room[node] == larger_room:
                break  # so it is above
            room[node] = larger_room
    return [items for items in bins if items]
