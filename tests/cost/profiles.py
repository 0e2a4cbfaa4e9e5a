"""Profiles with known coefficients."""

from lengthwise.core.cost import ProfileRow, ProfileTable
from lengthwise.core.pipeline_config import Method, uniform_scheme
from lengthwise.core.specs import ModelSpec, cluster_preset, model_preset
from lengthwise.cost.memory_model import DTYPE_BYTES, kept_bytes_per_layer, loss_bytes_per_token

MODEL = model_preset("llama-tiny")
CLUSTER = cluster_preset("2xcpu")
LENGTHS = [(64,), (256,), (1024,), (4096,), (256,) * 16, (1024, 512, 64)]
MANY_LENGTHS = [*((2**power,) for power in range(5, 13)), (64,) * 64, (512,) * 8, (2048, 2048), (1024, 512, 64)]


def row(lengths, a=1e-8, b=1e-5, c=2e-3, noise=1.0):
    """A row of a s l^2 + b s l + c s, keeping 1,000 bytes and 64 a token."""
    time_s = (a * sum(n * n for n in lengths) + b * sum(lengths) + c) * noise
    return ProfileRow(lengths=lengths, time_s=time_s, spread_s=0.0, kept_bytes=1000 + 64 * sum(lengths))


def table(rows=None, **changes):
    """A profile of llama-tiny on two CPU ranks."""
    values = {
        "model_digest": MODEL.digest, "model_name": MODEL.name, "device": "cpu", "dtype": "float32",
        "recompute": False, "num_ranks": 2, "update_s": 0.03,
    }  # fmt: skip
    rows = [row(lengths) for lengths in LENGTHS] if rows is None else rows
    return ProfileTable(**{**values, **changes}, rows=tuple(rows))


def scheme_of(model, method, degree=4, stages=1, recomputed=0):
    """One method on every layer; dense at degree 1."""
    method = Method.DENSE if degree == 1 else method
    return uniform_scheme(model.num_layers, degree=degree, stages=stages, method=method, recomputed=recomputed)


PARALLEL = [method for method in Method if method is not Method.DENSE]


def kept_bytes_per_token(model: ModelSpec, *, dtype: str, recompute: bool) -> float:
    """Bytes per token that one forward leaves for the backward on a device that computes whole layers.

    A recomputed layer keeps its input alone; one such layer is alive at a time while the backward runs. The loss keeps
    the final norm's input, output and its gradient.
    """
    width = DTYPE_BYTES[dtype]
    residual, layer = model.hidden_size, kept_bytes_per_layer(model, width)
    layers = model.num_layers * residual * width + layer if recompute else model.num_layers * layer
    return layers + loss_bytes_per_token(model, width)
