"""Cut a tree into parts of limited size that repeat as little of it as can be.

A part is some of the tree's leaves with all that leads to them from a root, so what leads to the leaves of several
parts is in each of them. The fewest parts are a problem of bin packing, hence the limit on the search.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

MOST_NODES = 600
"""Assignments of a leaf to a part that a search looks at, beyond the greedy ones of its first descent."""


@dataclass(frozen=True, kw_only=True)
class TreeParts:
    """The parts of a tree, and how good they are."""

    parts: tuple[tuple[int, ...], ...]
    """The leaves of each part, ascending."""
    repeated: int
    """The size of what parts repeat: their sizes less that of the tree."""
    is_optimal: bool
    """Whether no parts within the limit are proven to repeat less."""


def cut_tree(sizes: Sequence[int], paths: Sequence[Sequence[int]], limit: int) -> TreeParts | None:
    """Cut a tree into parts of at most ``limit``; None: a leaf with all that leads to it is larger.

    Branch and bound, leaf by leaf, the largest first: what parts repeat so far never becomes less.

    Args:
        sizes: of each node.
        paths: for each leaf its nodes, from a root to itself.
        limit: of the size of a part.
    """
    if any(sum(sizes[node] for node in path) > limit for path in paths):
        return None
    search = _Search(sizes=sizes, paths=paths, limit=limit)
    search.descend(0, 0)
    parts = sorted(tuple(sorted(part)) for part in search.best)
    return TreeParts(parts=tuple(parts), repeated=search.least, is_optimal=search.nodes <= search.most_nodes)


def fewest_repeated(sizes: Sequence[int], paths: Sequence[Sequence[int]], limit: int) -> int:
    """A bound: parts of at most ``limit`` repeat no less than this of the tree.

    Parts that all begin with the nodes that every leaf has are at least as many as the rest of the tree needs.
    """
    common = set.intersection(*map(set, paths))
    shared = sum(sizes[node] for node in common)
    rest = sum(sizes[node] for node in set().union(*paths) - common)
    return 0 if shared + rest <= limit else (-(-rest // max(1, limit - shared)) - 1) * shared


@dataclass(kw_only=True)
class _Search:
    """The state of the search: the parts as they are, and the best so far."""

    sizes: Sequence[int]
    paths: Sequence[Sequence[int]]
    limit: int
    nodes: int = 0
    least: int = field(init=False)
    best: list[list[int]] = field(init=False)
    _parts: list[list[int]] = field(default_factory=list)
    _nodes: list[set[int]] = field(default_factory=list)
    """The nodes of each part."""
    _room: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._uses = list(repeat(0, len(self.sizes)))
        self._order = sorted(range(len(self.paths)), key=lambda leaf: -self.sizes[self.paths[leaf][-1]])
        self._bound = fewest_repeated(self.sizes, self.paths, self.limit)
        self.most_nodes = MOST_NODES + len(self.paths) ** 2
        self.least, self.best = 1 + sum(sum(self.sizes[node] for node in path) for path in self.paths), []

    def descend(self, depth: int, repeated: int) -> None:
        """Assign the leaves from the ``depth``-th on, where those before repeat ``repeated``."""
        if repeated >= self.least or self.least <= self._bound or self.nodes > self.most_nodes:
            return
        if depth == len(self._order):
            self.least, self.best = repeated, [list(part) for part in self._parts]
            return
        leaf = self._order[depth]
        for more, _, part in sorted(self._choices(leaf)):
            self.nodes += 1
            nodes = self._add(leaf, part)
            self.descend(depth + 1, repeated + more)
            self._remove(part, nodes)

    def _choices(self, leaf: int) -> list[tuple[int, int, int]]:
        """What a leaf adds to what is repeated, the room left then, and its part; one of them a new one."""
        choices = []
        for part in range(len(self._parts) + 1):
            nodes_of_part = self._nodes[part] if part < len(self._parts) else set[int]()
            nodes = [node for node in self.paths[leaf] if node not in nodes_of_part]
            room = (self._room[part] if part < len(self._parts) else self.limit) - sum(self.sizes[n] for n in nodes)
            if room >= 0:
                choices.append((sum(self.sizes[node] for node in nodes if self._uses[node]), room, part))
        return choices

    def _add(self, leaf: int, part: int) -> list[int]:
        """Put a leaf into a part; the nodes that it had not."""
        if part == len(self._parts):
            self._parts.append([])
            self._nodes.append(set())
            self._room.append(self.limit)
        nodes = [node for node in self.paths[leaf] if node not in self._nodes[part]]
        self._parts[part].append(leaf)
        self._nodes[part].update(nodes)
        self._room[part] -= sum(self.sizes[node] for node in nodes)
        for node in nodes:
            self._uses[node] += 1
        return nodes

    def _remove(self, part: int, nodes: list[int]) -> None:
        """Take the last leaf out of a part, and ``nodes``, which it brought."""
        self._parts[part].pop()
        self._nodes[part].difference_update(nodes)
        self._room[part] += sum(self.sizes[node] for node in nodes)
        for node in nodes:
            self._uses[node] -= 1
        if not self._parts[part]:
            self._parts.pop(), self._nodes.pop(), self._room.pop()
