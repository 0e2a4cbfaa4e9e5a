"""Two forwards of different lengths say what each call is, or differ in a way that cannot be sharded."""

from dataclasses import replace

import pytest

from lengthwise.core.errors import InputError
from lengthwise.runtime.wrap.call_rules import ForwardCall, ForwardCalls, Product, compare

LENGTHS = (11, 7)
SEEN = ForwardCall(kind="attention", shape=(1, 4, 11, 8), note="causal", scale=0.5)
AGAIN = replace(SEEN, shape=(1, 4, 7, 8))


def rules_of(first, second, *, products=((), ())):
    ones, others = (
        ForwardCalls(attention=[call], products=list(made)) for call, made in zip((first, second), products)
    )
    return compare(ones, others, LENGTHS)


def test_the_axis_that_followed_the_length_has_the_slots():
    (rule,) = rules_of(SEEN, AGAIN).attention
    assert (rule.dim, rule.note, rule.scale, rule.is_over_slots) == (2, "causal", 0.5, True)
    (rule,) = rules_of(replace(SEEN, shape=(11, 4, 9, 8)), replace(SEEN, shape=(7, 4, 9, 8))).attention
    assert (rule.dim, rule.is_over_slots) == (0, False)
    (rule,) = rules_of(SEEN, SEEN).attention
    assert (rule.dim, rule.is_over_slots) == (None, False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "flash"}, "is another for sequences of 7 slots: flash of"),
        ({"shape": (4, 7, 8)}, r"is another for sequences of 7 slots: attention of \(4, 7, 8\)"),
        ({"shape": (7, 4, 7, 8)}, "grows with the sequence otherwise than one axis with its slots"),
        ({"shape": (1, 4, 6, 8)}, "grows with the sequence otherwise than one axis with its slots"),
        ({"note": ""}, "is causal for 11 slots, unmasked for 7"),
        ({"scale": 0.25}, "scales its logits by 0.5 for 11 slots and by 0.25 for 7"),
        ({"scale": None}, "scales its logits by 0.5 for 11 slots and by None for 7"),
    ],
)
def test_a_call_that_is_another_for_another_length_is_refused(changes, reason):
    first = replace(SEEN, shape=(11, 4, 11, 8)) if changes.get("shape", ())[:1] == (7,) else SEEN
    with pytest.raises(InputError, match=reason):
        rules_of(first, replace(AGAIN, **changes))


def test_products_by_hand_that_are_others_for_another_length_are_refused():
    scores, other = Product(is_scores=True, layer=0), Product(is_scores=False, layer=0)
    assert rules_of(SEEN, AGAIN, products=((other, scores), (other, scores))).products == (other, scores)
    assert rules_of(SEEN, AGAIN, products=((other,), (other, other))).products == ()
    for made in ((scores, other), (scores,)):
        with pytest.raises(InputError, match="computes an attention by hand for 11 slots in another way than for 7"):
            rules_of(SEEN, AGAIN, products=((other, scores), made))


def test_places_that_count_one_number_for_each_slot_from_the_same_start_make_positions():
    def code():
        """Stand for the code of a model."""

    ones, others = ForwardCalls(), ForwardCalls()
    for number, starts in enumerate([(1, 1), (1, 2), (1, None), (None, 1)]):
        for calls, start in zip((ones, others), starts):
            calls.note_place(("arange", code.__code__, number), start)
    for start in (1, 2):
        ones.note_place(("arange", code.__code__, 9), start)
        others.note_place(("arange", code.__code__, 9), 1)
    assert compare(ones, others, LENGTHS).places == {("arange", code.__code__, 0): 1}
