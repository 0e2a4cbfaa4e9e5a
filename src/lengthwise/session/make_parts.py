"""Choose the engine of a configured run, build its model and make its parts."""

from collections.abc import Callable

from torch import nn

from lengthwise.core.specs import ModelSpec
from lengthwise.models.stock_model import StockModel
from lengthwise.runtime.comm.activity import ACTIVITY
from lengthwise.session.own_run import own_parts
from lengthwise.session.run_model import build, load_stock
from lengthwise.session.run_parts import RunInputs, RunParts


def make_parts(inputs: RunInputs, spec: ModelSpec | StockModel, *, on_built: Callable[[nn.Module], object]) -> RunParts:
    """Build the model of a run, have ranks compare it by ``on_built``, and make the parts of the run."""
    ACTIVITY.begin("building the model")
    if isinstance(spec, ModelSpec):
        model = build(inputs.config, spec, inputs.world)
        on_built(model)
        return own_parts(inputs, spec, model)
    from lengthwise.session.stock_run import stock_parts

    stock = load_stock(inputs.config, spec)
    on_built(stock)
    ACTIVITY.begin("preparing the model")
    return stock_parts(inputs, spec, stock)
