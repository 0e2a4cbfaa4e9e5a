"""The base of cost models made from profiles, which refuse schemes that were not measured."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from lengthwise.core.cost import ProfileTable
from lengthwise.core.errors import InputError, Setting
from lengthwise.core.pipeline_config import Method, PipelineConfig, Strategy, dense_scheme, uniform_scheme
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.analytic.grouped_heads import head_group_counts
from lengthwise.cost.profiled.unmeasured_offload import UnmeasuredOffload, without_offload_and_tiles
from lengthwise.cost.separable import SchemeCache, SeparableCost

Tables = ProfileTable | Sequence[tuple[PipelineConfig, ProfileTable]]
"""A profile of one device that computes the whole model, or profiles and the scheme that each was taken under."""


def tables_by_scheme(table: ProfileTable, *, num_layers: int) -> list[tuple[PipelineConfig, ProfileTable]]:
    """The rows of a profile by the scheme that they were measured under: of one device, and of devices that share.

    Methods whose weights lie alike have one update, the median of what was measured beside each.
    """
    tables = [(dense_scheme(num_layers, recompute=table.recompute), replace(table, shared=()))]
    updates_s: dict[int, list[float]] = {}
    for part in table.shared:
        if part.update_s is not None:
            updates_s.setdefault(part.degree, []).append(part.update_s)
    for part in table.shared:
        recomputed = num_layers if table.recompute else 0
        scheme = uniform_scheme(num_layers, degree=part.degree, method=Method(part.method), recomputed=recomputed)
        update_s = table.update_s if part.update_s is None else median(updates_s[part.degree])
        tables.append((scheme, replace(table, rows=part.rows, shared=(), update_s=update_s)))
    return tables


class ProfiledCost(SeparableCost):
    """A cost model that knows the schemes that were profiled, these with offload, tiles, sharded gradients and split
    backwards, and no others."""

    def __init__(
        self, tables: Tables, *, model: ModelSpec, cluster: ClusterSpec, narrow_gradients: bool = False
    ) -> None:
        """Check that every profile is of ``model`` and of one dtype.

        Raises:
            InputError: a profile is of another model, or they differ in dtype.
        """
        if isinstance(tables, ProfileTable):
            tables = [(dense_scheme(model.num_layers, recompute=tables.recompute), tables)]
        if not tables:
            raise InputError("costs need at least one profile; make one with: lengthwise profile")
        for _, table in tables:
            if table.model_digest != model.digest:
                raise InputError(
                    f"the profile is of model {table.model_name} ({table.model_digest}), the run trains {model.name} "
                    f"({model.digest}); profile this model with: lengthwise profile"
                )
        dtypes = sorted({table.dtype for _, table in tables})
        if len(dtypes) > 1:
            raise InputError(f"the profiles were measured in {' and '.join(dtypes)}; take all in one dtype")
        super().__init__(model=model, cluster=cluster, dtype=dtypes[0], narrow_gradients=narrow_gradients)
        self.tables = dict(tables)
        self._parts = SchemeCache(self._find_parts)
        self._offload = UnmeasuredOffload(
            AnalyticCost(model=model, cluster=cluster, dtype=dtypes[0], narrow_gradients=narrow_gradients),
            self.sequence_times_s,
        )

    def update_s(self, strategy: Strategy) -> float:
        """Measured seconds of a step outside its micro-batches: those of the strategy's slowest scheme."""
        schemes = dict.fromkeys(strategy.schemes)
        return max(self.tables[part].update_s for scheme in schemes for part in self._parts(scheme))

    def head_groups(self, degree: int) -> tuple[int, ...]:
        """Into how many groups plans may cut the heads of each of ``degree`` ranks."""
        return head_group_counts(self.model, degree)

    def longest(self, scheme: PipelineConfig) -> int:
        """Tokens of the longest sequence that was measured under every method of ``scheme``; more is a guess."""
        parts = self._parts(scheme)
        return min(max(max(row.lengths) for row in self.tables[part].rows) for part in parts)

    def largest_pack(self, scheme: PipelineConfig) -> int:
        """Tokens of the largest micro-batch that was measured under every method of ``scheme``; more is a guess."""
        parts = self._parts(scheme)
        return min(max(sum(row.lengths) for row in self.tables[part].rows) for part in parts)

    def _host_line(self, scheme: PipelineConfig, num_devices: int) -> tuple[float, float]:
        per_token = 0.0 if scheme.is_plain else self._offload.host_bytes_per_token(scheme)
        return self._host_state_bytes(num_devices), per_token

    def _find_parts(self, scheme: PipelineConfig) -> dict[PipelineConfig, float]:
        """Profiled schemes, and the share of the layers of ``scheme`` that are computed as in each.

        Raises:
            InputError: one of them was not profiled.
        """
        if scheme in self.tables:
            return {scheme: 1.0}
        if not scheme.is_plain or scheme.shard_gradients or scheme.zero_bubble:
            plain = without_offload_and_tiles(scheme)
            return self._find_parts(replace(plain, shard_gradients=False, zero_bubble=False))
        shares = Counter(scheme.methods)
        parts = {
            replace(scheme, methods=(method,) * scheme.num_layers): count / scheme.num_layers
            for method, count in shares.items()
        }
        if not parts.keys() <= self.tables.keys():
            raise InputError(self._refusal(scheme))
        return parts

    def _refusal(self, scheme: PipelineConfig) -> str:
        is_dense = scheme.num_devices == 1 and set(scheme.methods) == {Method.DENSE}
        if is_dense and scheme.num_recomputed in (0, scheme.num_layers) and len(self.tables) == 1:
            table = next(iter(self.tables.values()))
            return (
                f"the profile was taken with recompute={str(table.recompute).lower()}; "
                f"profile again with the run's {Setting.RECOMPUTE}"
            )
        profiled = ", ".join(profiled.name for profiled in self.tables)
        return f"no profile of scheme {scheme.name}; there are: {profiled}. Profile it, or plan with analytic costs."
