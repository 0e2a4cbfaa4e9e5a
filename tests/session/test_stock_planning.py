"""Settings of a configuration as options of ``prepare``, for models that transformers computes."""

from types import SimpleNamespace

import pytest

from lengthwise.config.run_config import load
from lengthwise.session.stock_planning import stock_options


@pytest.mark.parametrize(
    ("setting", "tile"), [((), None), (("plan.tile_tokens=0",), None), (("plan.tile_tokens=7",), 7)]
)
def test_tiles_are_those_of_the_models_modules(setting, tile):
    stock = SimpleNamespace(architecture="LlamaForCausalLM", mask_token_id=None)
    assert stock_options(load(None, list(setting)), stock, quiet=True).feed_forward_tile == tile
