"""The passes of a pipeline's stages, and the order in which a schedule without split backwards runs them."""

from enum import IntEnum, StrEnum


class PipelineSchedule(StrEnum):
    """In which order the stages of a pipeline run forwards and backwards."""

    ONE_F_ONE_B = "1f1b"
    """A backward as soon as there is one: at most as many micro-batches in flight as stages are left."""
    GPIPE = "gpipe"
    """All forwards, then all backwards (Huang et al. 2019): every micro-batch in flight at once."""


class PassKind(IntEnum):
    """What a stage does with a micro-batch, in the order in which it does it."""

    FORWARD = 0
    BACKWARD = 1
    """All of it, or where it is split the gradient of the stage's input."""
    WEIGHTS = 2
    """What is left of a split backward: the gradients of weights."""

    @property
    def word(self) -> str:
        """The name of such a pass in timelines: ``forward``, ``backward`` or ``weights``."""
        return self.name.lower()


Pass = tuple[PassKind, int]
"""One pass of one micro-batch, by its number."""


def issue_order(
    stage: int, *, num_stages: int, num_micro_batches: int, schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
) -> list[Pass]:
    """The passes of one stage whose backwards are whole.

    1F1B (PipeDream-Flush; Narayanan et al. 2021, section 2.2): as many forwards as there are stages behind this one;
    then a forward and a backward in turn; then the rest.
    """
    ahead = num_micro_batches if schedule is PipelineSchedule.GPIPE else num_stages - 1 - stage
    warm_up = min(ahead, num_micro_batches)
    order = [(PassKind.FORWARD, i) for i in range(warm_up)]
    for i in range(num_micro_batches - warm_up):
        order += [(PassKind.FORWARD, warm_up + i), (PassKind.BACKWARD, i)]
    return order + [(PassKind.BACKWARD, i) for i in range(num_micro_batches - warm_up, num_micro_batches)]
