"""Collection of cyclic garbage is as it was before, whatever happened meanwhile."""

import gc

import pytest

from lengthwise.core.garbage import collection_paused


def test_collection_goes_on_as_before_even_after_an_error():
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
