"""Whether the ranks of a run keep master weights, summed gradients and optimizer state in host memory."""

from lengthwise.config.choices import StatePlace


def is_on_host(place: StatePlace) -> bool:
    """Whether the state lies in host memory under the setting ``offload_state``."""
    return place == "host"
