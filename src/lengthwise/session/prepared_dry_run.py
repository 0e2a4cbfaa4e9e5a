"""The dry run of a model that transformers computes: its layers counted, its step planned, and ranks of it run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lengthwise.config.choices import HeldWeights
from lengthwise.config.run_config import Config
from lengthwise.core.errors import InputError
from lengthwise.core.head_split import shared_by
from lengthwise.core.layer_profile import AS_PREPARED, AttentionSizes, Identity, LayerRow, LayerTable, LayerVariant
from lengthwise.core.pipeline_config import HEAD_GROUP_METHODS, Method, PipelineConfig, uniform_scheme
from lengthwise.core.specs import ClusterSpec
from lengthwise.core.step_plan import StepPlan
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.analytic.rank_work import rank_work
from lengthwise.cost.profiled.dual_layer import DualLayerCost
from lengthwise.cost.profiled.layer_gather_cost import LayerGatherCost
from lengthwise.models.hf_sizes import has_dense_layers
from lengthwise.models.stock_model import StockModel
from lengthwise.session.state_placement import is_on_host
from lengthwise.sim.issued_collectives import differences_between_ranks

UNKNOWN_S = 1e-9
"""Seconds of a layer whose sizes no data sheet prices: bytes are right all the same."""


class PreparedDryRun:
    """Dry runs of one model of transformers on a cluster, where every rank holds all weights or gathers layers."""

    def __init__(self, config: Config, stock: StockModel, cluster: ClusterSpec) -> None:
        self.config, self.stock, self.cluster = config, stock, cluster
        dtype = config.train.dtype
        self.analytic = None if stock.spec is None else AnalyticCost(model=stock.spec, cluster=cluster, dtype=dtype)

    def request(self, **others: Any) -> dict[str, Any]:
        """A request for what ``others`` say of this model."""
        stock, config = self.stock, self.config
        return {
            "stock": {
                "folder": str(stock.folder),
                "architecture": stock.architecture,
                "objective": stock.objective,
                "vocab_size": stock.vocab_size,
                "mask_token_id": None if stock.causal else stock.mask_token_id,
                "dtype": config.train.dtype,
            },
            "optimizer": asdict(config.optim.optimizer_settings),
            "ranks_per_node": self.cluster.devices_per_node,
            **others,
        }

    def profile_request(
        self,
        longest: int,
        schemes: Sequence[tuple[int, Method]],
        pack: Sequence[int] = (),
        variants: Sequence[LayerVariant] = (AS_PREPARED,),
    ) -> dict[str, Any]:
        """A request to count layers in sequences of ``longest`` tokens and of a fourth, by (degree, method).

        ``pack``: lengths of sequences that are counted in one pack, as large as any that is planned. ``variants``: how
        layers compute, under schemes that can.
        """
        packs = [
            (degree, str(method), lengths, asdict(variant))
            for degree, method in schemes
            for variant in variants
            if variant.head_groups == 1 or method in HEAD_GROUP_METHODS
            for lengths in sorted({(max(degree, longest // 4),), (max(degree, longest),), tuple(pack)} - {()}, key=sum)
        ]
        return self.request(packs=packs, ranks=[0], num_ranks=self.cluster.num_devices)

    def cost_of(self, profile: dict[str, Any], *, longest: int, weights: HeldWeights = "auto") -> DualLayerCost:
        """The cost model of prepared runs, of bytes as they were counted and seconds by data sheets.

        Raises:
            InputError: layers are to be gathered, and this model's cannot.
        """
        table, num_devices = self._table(profile, longest), self.cluster.num_devices
        on_host = is_on_host(self.config.train.offload_state)
        is_narrow = self.config.optim.optimizer_settings.narrow_gradients
        whole_cost = DualLayerCost(
            table, cluster=self.cluster, state_on_host=on_host, narrow_gradients=is_narrow,
            unit_params=tuple(profile["unit_params"]),
            attention=None if profile["attention"] is None else AttentionSizes(*profile["attention"]),
        )  # fmt: skip
        if num_devices == 1 or weights == "whole":
            return whole_cost
        if profile["gather_problem"] and weights == "by-layer":
            raise InputError(
                f"the weights of {self.stock.architecture} cannot be gathered layer by layer: "
                f"{profile['gather_problem']}; use --weights whole"
            )
        if weights == "auto" and (profile["gather_problem"] or whole_cost.holds(longest)):
            return whole_cost
        units = tuple(profile["unit_params"])
        gather = LayerGatherCost(
            unit_params=units, unit_frozen_bytes=(0,) * len(units), dtype=table.identity.dtype, state_on_host=on_host,
            narrow_gradients=is_narrow, has_early_output=profile["has_early_output"],
            head_units=tuple(profile["head_units"]),
        )  # fmt: skip
        return whole_cost.with_gather(gather)

    def step_request(self, plan: StepPlan, ranks: Sequence[int], *, num_kept: int | None) -> dict[str, Any]:
        """A request to run the step of ``plan`` as ``ranks``.

        ``num_kept``: how many of the last layers stay whole where weights are gathered by layer; None: all weights are.
        """
        return self.request(
            plan=plan.to_json(), ranks=list(ranks), num_kept=num_kept,
            state_on_host=is_on_host(self.config.train.offload_state),
        )  # fmt: skip

    def beside_prediction(
        self, plan: StepPlan, cost: DualLayerCost, row: dict[str, Any], num_kept: int
    ) -> dict[str, Any]:
        """What a rank did in its step, and what the cost models say of it."""
        predicted: dict[str, Any] = {"peak_bytes": {}, "peak_total_bytes": None, "flops": {}, "sent_bytes": {}}
        pipeline = next((pipeline for pipeline in plan.pipelines if row["rank"] in pipeline.ranks), None)
        scheme = uniform_scheme(cost.table.num_layers) if pipeline is None else pipeline.scheme
        stage = 0 if pipeline is None else pipeline.ranks.index(row["rank"]) // scheme.degree
        packs = {} if pipeline is None else {m.pack.num_tokens: pipeline.scheme_of(m) for m in pipeline.micro_batches}
        peaks = [
            cost.stage_state(num_tokens, of_pack, stage, num_devices=plan.num_devices, num_kept=num_kept)
            for num_tokens, of_pack in (packs or {0: scheme}).items()
        ]
        state, beside = max(peaks, key=lambda peak: sum(peak[0]) + peak[1])
        predicted["peak_bytes"] = dict(zip(("weights", "gradients", "optimizer"), state))
        predicted["peak_total_bytes"] = sum(state) + beside if packs else None
        if self.analytic is not None:
            work = rank_work(plan, row["rank"], self.analytic, is_prepared=True)
            predicted["flops"] = {"products": work.matmul_flops, "attention": work.attention_flops}
            predicted["sent_bytes"] = dict(work.sent_bytes)
        return with_totals(row) | {"predicted": predicted}

    def _table(self, profile: dict[str, Any], longest: int) -> LayerTable:
        num_layers = len(profile["unit_params"]) - 2
        rows = []
        for degree, method, lengths, variant, counted in profile["rows"]:
            scheme = uniform_scheme(num_layers, degree=degree, method=Method(method))
            layer_s = self._layer_s(lengths, scheme)
            row = LayerRow(
                lengths=tuple(lengths), degree=degree, method=method, forward_s=layer_s / 3,
                backward_s=2 * layer_s / 3, constant_s=0.0, forward_spread_s=0.0, backward_spread_s=0.0,
                constant_spread_s=0.0, repeats=1, weights_s=self._weights_s(lengths, scheme), **variant, **counted,
            )  # fmt: skip
            rows.append(row)
        identity = Identity(
            model_name=self.stock.architecture, model_digest=self.stock.digest, device=self.cluster.device.name,
            dtype=self.config.train.dtype, num_ranks=self.cluster.num_devices, software="dry run",
        )  # fmt: skip
        return LayerTable(
            identity=identity, num_layers=num_layers, num_params=sum(profile["unit_params"]),
            other_bytes=profile["other_bytes"], longest=longest, update_s=0.0, rows=tuple(rows),
        )  # fmt: skip

    def _layer_s(self, lengths: Sequence[int], scheme: PipelineConfig) -> float:
        if self.analytic is None:
            return UNKNOWN_S * sum(lengths)
        return self.analytic.time_s(lengths, scheme) / scheme.num_layers

    def _weights_s(self, lengths: Sequence[int], scheme: PipelineConfig) -> float:
        """Seconds of a layer in gradients of weights that can wait."""
        if self.analytic is None or not has_dense_layers(self.analytic.model):
            return 0.0
        return float(self.analytic.weight_times_s(np.asarray(lengths), scheme).sum()) / scheme.num_layers


def schemes_of(plan: StepPlan) -> list[tuple[int, Method]]:
    """The numbers of ranks that share a micro-batch, and the methods by which they do."""
    return sorted(
        {
            (pipeline.scheme.degree, method)
            for pipeline in plan.pipelines
            for micro_batch in pipeline.micro_batches
            for method in pipeline.methods_of(micro_batch)
        }
    )


def largest_pack(plan: StepPlan) -> tuple[int, ...]:
    """The lengths of the sequences of the micro-batch with most tokens."""
    packs = [m.pack for pipeline in plan.pipelines for m in pipeline.micro_batches]
    return max(packs, key=lambda pack: pack.num_tokens).lengths


def all_schemes(num_devices: int, max_degree: int | None, methods: Sequence[Method]) -> list[tuple[int, Method]]:
    """The schemes that plans choose from."""
    max_degree = max_degree or num_devices
    degrees = [degree for degree in range(1, max_degree + 1) if num_devices % degree == 0]
    return [(degree, method) for degree in degrees for method in shared_by(degree, methods)]


def differences_of(plan: StepPlan, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on collectives in micro-batches among ranks that no plan has, and on what differs between ranks."""
    stages = {p.ranks_of(stage) for p in plan.pipelines for stage in range(p.scheme.num_stages)}
    groups = stages | {tuple(range(plan.num_devices))}
    unplanned = [
        f"rank {row['rank']}, {collective['operation']}: {collective['kind']} among unplanned {collective['ranks']}"
        for row in rows
        for collective in row["collectives"]
        if tuple(collective["ranks"]) not in groups and collective["kind"] not in ("send", "receive")
    ]
    return unplanned + differences_between_ranks({row["rank"]: row["collectives"] for row in rows})


def with_totals(row: dict[str, Any]) -> dict[str, Any]:
    """What a rank did, with its peak over all kinds and the bytes that it sent by kind of collective."""
    sent: Counter[str] = Counter()
    for collective in row["collectives"]:
        sent[collective["kind"]] += collective["sent_bytes"]
    return {**row, "peak_total_bytes": sum(row["peak_bytes"].values()), "sent_bytes": dict(sent)}


def num_kept_in(cost: DualLayerCost, plan: StepPlan) -> int:
    """How many of the last layers stay whole in a step where weights are gathered by layer."""
    return 0 if cost.gather is None else cost.gather.num_kept_in(cost.memory_limit_bytes, plan)
