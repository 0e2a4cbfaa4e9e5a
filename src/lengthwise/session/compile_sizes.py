"""What `train.compile` needs before training: the sizes to compile for, and where compiled code is kept."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from lengthwise.config.run_config import Config
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.plan.plan_file import PlanFile
from lengthwise.plan.planner import Planner
from lengthwise.plan.static_shapes import share_sizes
from lengthwise.session.console import stderr

if TYPE_CHECKING:
    from lengthwise.runtime.comm.world import DistContext
    from lengthwise.runtime.compile.compiled_layers import CompiledLayers

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def tell_sizes(planner: Planner) -> None:
    """Say which sizes micro-batches are filled up to, if to any, and what that costs."""
    lattice = planner.problem.lattice
    if lattice is not None:
        sizes = ", ".join(f"{size:,}" for size in lattice.sizes)
        sizes_text = f"micro-batches of {sizes} tokens: {lattice.waste:.1%} of typical batches is padding"
        stderr().print(sizes_text, soft_wrap=True)


def sizes_of(config: Config, planner: Planner | PlanFile) -> tuple[int, ...]:
    """How many tokens a rank may hold of a micro-batch: what layers are compiled for. None, if they are not.

    Raises:
        InputError: plans of a file have more sizes than ``plan.shapes``, or share layers as compiled ones cannot.
    """
    if not config.train.compile:
        return ()
    if isinstance(planner, Planner):
        return share_sizes(planner.problem)
    from lengthwise.runtime.train.executable import check_compiled
    from lengthwise.sim.schedule_check import shares_of

    sizes: set[int] = set()
    for step in range(config.train.num_steps):
        plan = planner.plan(step)
        check_compiled(plan)
        sizes = sizes.union(*(shares_of(plan, rank) for rank in range(plan.num_devices)))
    if len(sizes) > (max_sizes := config.plan.shapes or 0):
        raise InputError(
            f"train.compile=true: the plans of {planner.path} have {len(sizes)} sizes of micro-batches, plan.shapes "
            f"allows {max_sizes}; plan again with plan.shapes set, or raise it to what compiling may take"
        )
    return tuple(sorted(sizes, reverse=True))


def compiled_layers(
    sizes: tuple[int, ...], world: "DistContext", folder: RunFolder, on_size: Callable[[int, int], None] | None
) -> "CompiledLayers | None":
    """What runs layers of ``sizes``; None: they are not compiled.

    Raises:
        InputError: there is nothing here to compile with, or its cache has a space in its path.
    """
    if not sizes:
        return None
    from lengthwise.runtime.compile.compiled_layers import CompiledLayers

    use_cache(folder, world)
    return CompiledLayers(world.device, sizes, on_size=on_size)


def use_cache(folder: RunFolder, world: "DistContext") -> None:
    """Keep compiled code in the run's folder unless the environment names a place.

    Raises:
        InputError: the place has a space in its path.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(CACHE_VARIABLE, default_cache_dir()) == default_cache_dir():  # which torch may have set itself
        os.environ[CACHE_VARIABLE] = str(folder.compiler.absolute())
    cache = os.environ[CACHE_VARIABLE]
    if world.device.type == "cpu" and any(map(str.isspace, cache)):
        raise InputError(  # PyTorch does not quote it for the C++ compiler
            f"train.compile=true keeps compiled code in '{cache}', and PyTorch's C++ builds fail where a path has "
            f"spaces; choose an output folder without, or name another place in {CACHE_VARIABLE}"
        )
