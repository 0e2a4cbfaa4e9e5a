"""Costs from a file of `lengthwise profile`, for runs and for questions about them."""

from dataclasses import dataclass
from pathlib import Path

from lengthwise.core.cost import CostError, ProfileTable
from lengthwise.core.errors import InputError, Setting
from lengthwise.core.read_file import brief
from lengthwise.core.specs import ClusterSpec, ModelSpec
from lengthwise.cost.links import with_measured_links
from lengthwise.cost.profiled.fitted import FittedCost
from lengthwise.cost.profiled.measured_schemes import ProfiledCost, tables_by_scheme


@dataclass(frozen=True, kw_only=True)
class MeasuredProfile:
    """A file of measurements, and what it holds."""

    path: str
    table: ProfileTable

    @classmethod
    def open(cls, path: str | Path, *, dtype: str, recompute: str) -> "MeasuredProfile":
        """Read the file, for plans in ``dtype`` with layers under activation checkpointing by ``recompute``.

        Raises:
            InputError: it is damaged, or of another dtype or another recompute ("auto" takes either).
        """
        table = ProfileTable.load(Path(path))
        if table.dtype != dtype:
            raise InputError(
                f"{path} was measured in {table.dtype}, and plans are asked for in {dtype}; profile again in {dtype}, "
                f"or set {Setting.DTYPE}={table.dtype}"
            )
        if recompute not in ("auto", measured := "all" if table.recompute else "none"):
            raise InputError(
                f"{path} was measured with {Setting.RECOMPUTE}={measured}, and plans are asked for with "
                f"{Setting.RECOMPUTE}={recompute}; profile again with that, or set {Setting.RECOMPUTE}=auto"
            )
        return cls(path=str(path), table=table)

    def cost(
        self, model: ModelSpec, cluster: ClusterSpec, *, is_learned: bool = False, narrow_gradients: bool = False
    ) -> ProfiledCost:
        """The cost model of what was measured: fitted, a l^2 + b l + c, or a random forest where ``is_learned``.

        Links that the profile measured take the place of those of ``cluster``.

        Raises:
            InputError: the profile is of another model or another kind of device, or has too few rows.
        """
        family = cluster.device.name.partition("-")[0]
        if family.lower() not in self.table.device.lower():
            raise InputError(
                f"{self.path} was measured on {brief(self.table.device)}, and plans are asked for "
                f"{cluster.device.name}; profile again on its devices, or leave {Setting.PROFILE} out for analytic "
                "costs"
            )
        cluster = with_measured_links(cluster, self.table.links)
        tables = tables_by_scheme(self.table, num_layers=model.num_layers)
        kind: type[ProfiledCost] = FittedCost
        if is_learned:
            from lengthwise.cost.profiled.hybrid import HybridCost

            kind = HybridCost
        try:
            return kind(tables, model=model, cluster=cluster, narrow_gradients=narrow_gradients)
        except InputError as error:
            raise error.with_message(
                f"{self.path}: {error.marked}; or leave {Setting.PROFILE} out for analytic costs"
            ) from None

    def in_words(self, error: CostError | None) -> str:
        """Where costs come from, and how far they are from the measurements."""
        table = self.table
        num_rows = len(table.rows) + sum(len(shared.rows) for shared in table.shared)
        words = f"fitted to {num_rows} micro-batches measured on {table.device}, {table.num_ranks} ranks ({self.path})"
        return f"{words}: {error}" if error else words
