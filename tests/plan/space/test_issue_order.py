"""The order in which a pipeline issues its packs."""

import random
from types import SimpleNamespace

from lengthwise.plan.space import draft_times


def test_packs_of_equal_times_are_in_the_order_of_their_first_ids(monkeypatch):
    monkeypatch.setattr(draft_times, "hides_updates", lambda cost: False)
    rng = random.Random(0)
    ids = rng.sample(range(1000), 60)
    packs = [tuple(range(first, first + 2)) for first in range(0, 60, 2)]
    times_s = [float(rng.randrange(4)) for _ in packs]
    priced = SimpleNamespace(batch=SimpleNamespace(ids=ids), problem=SimpleNamespace(cost=None))
    pipeline = SimpleNamespace(is_in_order=False, packs=packs, candidate=SimpleNamespace(num_stages=2))
    order = draft_times.issue_order(priced, pipeline, times_s)
    assert order == sorted(range(len(packs)), key=lambda k: (-times_s[k], ids[packs[k][0]]))
