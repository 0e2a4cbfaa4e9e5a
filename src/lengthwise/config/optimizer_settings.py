"""Optimizers and their constants, for configurations and prepared runs alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lengthwise.core.errors import InputError

STATE = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "adafactor": ("row_var", "col_var", "variance"),
}
"""Tensors that each optimizer keeps of a parameter, or of some parameters."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Which optimizer, and its constants. Matrices decay, vectors do not."""

    name: str = "adamw"
    """One of ``STATE``; with ``make``, any."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW and Adafactor: gradients smaller than this do not count as directions."""
    momentum: float = 0.9
    """Of SGD; 0: none."""
    weight_decay: float = 0.1
    make: Callable[[list[dict[str, Any]]], Any] | None = None
    """Makes an optimizer of torch from parameter groups, of matrices and of vectors; None: ``name`` says which. Each
    parameter is updated whole, by one rank. Its constants, and its learning rate and weight decay where nobody asks for
    others, are its own, as in torch."""
    asks_weight_decay: bool = False
    """Whether the groups that ``make`` gets have ``weight_decay``."""
    asked_lr: float | None = None
    """The learning rate that the groups have which ``make`` gets; None: none, it says one itself."""
    has_lr_function: bool = False
    """Whether a function of the step gives the learning rate."""
    base_lr: float | None = None
    """The rate that stands for those of all groups that ``make`` makes, as a trial says; None: all have the same."""
    groups: tuple[str, ...] = ()
    """The constants of each group that ``make`` makes of all parameters, as a trial says; an empty tuple: unknown."""
    empty_groups: tuple[int, ...] = ()
    """Positions of the groups that ``make`` makes without any of the parameters that it is given."""
    hides_empty_groups: bool = False
    """Whether it does not step with groups without parameters, as ranks have that update none of a group; they are
    taken out of it while it steps."""
    loss_scale: float | None = None
    """The first scale of the loss; None: 65,536 where a model computes in float16, else losses are not scaled."""
    loss_scale_window: int = 2000
    """Steps in a row without an overflow after which the loss scale doubles."""
    narrow_gradients: bool = False
    """Whether gradients are added up and summed over ranks in the dtype of the model's weights, not in float32."""
    tensors: tuple[str, ...] = ()
    """Names of the tensors and numbers that the optimizer keeps which ``make`` makes."""
    numbers: tuple[str, ...] = ()
    """Those of them that are plain numbers, such as a count of steps."""
    group_values: tuple[str, ...] = ()
    """Names of the values in its parameter groups that it changes when it steps."""
    coupling: str = ""
    """How its update of one parameter depends on the others, in words; an empty string: it does not."""
    takes_matrices_alone: bool = False
    """Whether what ``make`` makes takes parameters of two dimensions alone. Then it updates those of the layers, and
    AdamW, with the constants of here, all others: vectors, embedding and head."""

    def __post_init__(self) -> None:
        if self.make is None and self.name not in STATE:
            raise InputError(f"no optimizer {self.name!r}; known: {', '.join(STATE)}")
        if self.make is not None and self.narrow_gradients:
            raise InputError(
                f"gradient_dtype='compute': the optimizer gets such gradients one part after another, and {self.name} "
                f"may look at all of them in one step; leave gradient_dtype out, or name one of {', '.join(STATE)}"
            )

    @property
    def needs_whole_parameters(self) -> bool:
        """Whether the update of an element depends on its row and column: then parameters are not cut."""
        return self.make is not None or self.name == "adafactor"

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the tensors that the optimizer keeps for each parameter."""
        if self.make is not None:
            return self.tensors
        return () if self.name == "sgd" and not self.momentum else STATE[self.name]
