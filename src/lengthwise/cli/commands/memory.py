"""`lengthwise memory`: the longest sequence that each scheme holds, and the cheapest scheme for a length."""

from enum import StrEnum
from typing import Annotated

import typer

from lengthwise.cli import shared_options as shared
from lengthwise.cli.compare_options import ShardGradients, SlicesOption
from lengthwise.core.errors import errors_spelt
from lengthwise.plan.space.search_space import SearchSpace
from lengthwise.plan.space.sharded_gradients import GradientSharding
from lengthwise.plan.space.sliced_packs import Slices
from lengthwise.session.console import emit_json
from lengthwise.session.planning_args import COMMAND_LINE, find_model, make_cluster, parse_methods

Gpus = Annotated[int, typer.Option(min=1, max=shared.MAX_DEVICES, metavar="N", help="Devices of the cluster.")]
Length = Annotated[
    int | None,
    typer.Option(parser=shared.tokens_from(1), metavar="TOKENS", help="What fits a sequence this long, such as 32K?"),
]


class GradientDtype(StrEnum):
    """Values of ``--gradient-dtype``."""

    MASTER = "master"
    COMPUTE = "compute"


GradientDtypeOption = Annotated[
    GradientDtype,
    typer.Option(help="What gradients are added up in: float32 or above, or the dtype of --dtype."),
]


def run(
    model: shared.ModelName,
    device: shared.DeviceName,
    gpus: Gpus = 8,
    length: Length = None,
    table: Annotated[bool, typer.Option("--table", help="With --length, also show the table of all schemes.")] = False,
    hbm: shared.MemoryGib = None,
    host_memory: shared.HostMemoryGib = None,
    memory_margin: shared.MemoryMargin = None,
    devices_per_node: shared.DevicesPerNode = None,
    max_degree: shared.MaxDegree = None,
    max_stages: shared.MaxStages = None,
    methods: shared.Methods = None,
    shard_gradients: ShardGradients = GradientSharding.AUTO,
    slices: SlicesOption = Slices.AUTO,
    dtype: shared.DtypeOption = shared.Dtype.BFLOAT16,
    gradient_dtype: GradientDtypeOption = GradientDtype.MASTER,
    json: shared.Json = False,
) -> None:
    """Say what fits a sequence at the least cost, or show the longest sequence, or pack, of every scheme."""
    from lengthwise.cli.tables.memory_table import print_memory_limits
    from lengthwise.models.hf_sizes import has_slices
    from lengthwise.session.memory_limits import memory_limits

    spec = find_model(model)
    cluster = make_cluster(
        device, gpus, devices_per_node=devices_per_node, memory_gib=hbm, memory_margin=memory_margin,
        host_memory_gib=host_memory,
    )  # fmt: skip
    with errors_spelt(COMMAND_LINE):
        search_space = SearchSpace(
            max_degree=max_degree, max_stages=max_stages, methods=parse_methods(methods), head_layers=spec.head_layers,
            shard_gradients=shard_gradients, slices=slices if has_slices(spec) else Slices.NONE,
        )  # fmt: skip
        limits = memory_limits(
            spec, cluster, search_space, dtype=dtype.value, length=length,
            narrow_gradients=gradient_dtype is GradientDtype.COMPUTE,
        )  # fmt: skip
    if json:
        emit_json(limits.to_json())
    else:
        print_memory_limits(limits, table=table)
