"""A configuration and a corpus make a model that fits both."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from lengthwise.config.run_config import check, load
from lengthwise.core.batch import GlobalBatch
from lengthwise.core.cost import LinkSpeed, LinkSpeeds, ProfileRow, ProfileTable, SharedRows
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.lengths import LengthIndex
from lengthwise.core.run_folder import RunFolder
from lengthwise.core.specs import cluster_preset, model_preset
from lengthwise.cost.analytic.analytic_cost import AnalyticCost
from lengthwise.cost.corrected import CorrectedCost
from lengthwise.cost.links import call_s, collective_bytes_per_s, host_copy_bytes_per_s, with_measured_links
from lengthwise.data.corpus import Corpus, CorpusPart, open_corpus
from lengthwise.data.max_length import apply_max_length
from lengthwise.data.synthetic import synthetic_lengths
from lengthwise.models.hf_config import write_config
from lengthwise.runtime.analyze.reference import find_reference
from lengthwise.session.compile_sizes import CACHE_VARIABLE, compiled_layers, sizes_of
from lengthwise.session.planning import make_cost, make_planner, make_sampler, open_plans, resolve_cluster
from lengthwise.session.profile_model import packs_to_measure, shared_schemes
from lengthwise.session.state_placement import with_planned_state
from lengthwise.session.trained_model import resolve_model
from lengthwise.sim.engine import simulate
from lengthwise.sim.sim_options import SimOptions
from tests.index.build import build

TWO_SEQUENCES = Corpus(
    parts=(
        CorpusPart(
            name="two",
            store=SimpleNamespace(has_loss_mask=False),  # nothing is read
            view=apply_max_length(LengthIndex(lengths=np.array([5, 9])), max_length=None, rule="error"),
        ),
    )
)
CAUSAL, LOOKING_BOTH_WAYS = "gpt-12288", "bert-1024"


@pytest.fixture
def index(tmp_path, cli):
    """Bytes: 257 ids. The longest sequence has 601 tokens."""
    (tmp_path / "text").mkdir()
    for number, length in enumerate((600, 90, 30)):
        (tmp_path / "text" / f"{number}.txt").write_text("x" * length)
    code, _, err = cli("index", tmp_path / "text", "--out", tmp_path / "index")
    assert code == 0, err
    return tmp_path / "index"


def config_of(index, *, max_length=512, **model):
    data = {"index": str(index), "over_length": "split", "max_length": max_length}
    return check({"data": data, "model": model})


def resolve(index, **settings):
    config = config_of(index, **settings)
    return resolve_model(config, open_corpus(config.data))


def test_a_model_that_predicts_masked_tokens_has_an_id_more_which_is_its_mask(index):
    for preset in ("llama-tiny", CAUSAL):
        spec = resolve(index, preset=preset)
        assert (spec.vocab_size, spec.mask_token_id) == (320, None)
    spec = resolve(index, preset=LOOKING_BOTH_WAYS)
    assert (spec.vocab_size, spec.mask_token_id) == (320, 319)
    spec = resolve(index, preset=LOOKING_BOTH_WAYS, vocab_size=258)
    assert (spec.vocab_size, spec.mask_token_id) == (258, 257)
    assert resolve(index, preset=CAUSAL, vocab_size=257).vocab_size == 257
    with pytest.raises(InputError, match=r"258 token ids \(one of them its mask token\), model bert-1024 embeds 257"):
        resolve(index, preset=LOOKING_BOTH_WAYS, vocab_size=257)


def test_sequences_longer_than_the_positions_are_refused_before_the_run(index):
    assert resolve(index, preset=CAUSAL, max_length=None).max_positions == 2048
    with pytest.raises(InputError) as refused:
        resolve(index, preset=LOOKING_BOTH_WAYS, max_length=None)
    for part in ("601 tokens", "bert-1024", "positions for 512", "data.max_length=512", "data.over_length"):
        assert part in str(refused.value)


def test_the_positions_are_checked_on_the_command_line(cli, index):
    more = [f"data.index={index}", "cluster.name=1xH200-141GB", "train.dtype=bfloat16"]
    code, _, err = cli("plan", "model.preset=bert-1024", *more)
    assert code == 2 and "learned positions for 512" in err
    more += ["data.max_length=512", "data.over_length=split"]
    code, out, err = cli("plan", "model.preset=bert-1024", *more, "--steps", 1, "--json")
    assert code == 0, err
    # Sequences of 512, 89, 91 and 31 tokens; of each, 15 %.
    assert json.loads(out)["plans"][0]["loss_normaliser"] == 77 + 13 + 14 + 5


@pytest.mark.parametrize(("preset", "objective"), [(CAUSAL, "next-token"), (LOOKING_BOTH_WAYS, "masked")])
def test_batches_know_what_the_model_predicts(index, preset, objective):
    config = config_of(index, preset=preset)
    batch = next(make_sampler(config, open_corpus(config.data)))
    assert batch.objective == objective


@pytest.mark.parametrize("mask", [None, 103])
def test_a_hugging_face_bert_says_itself_which_token_masks(index, tmp_path, mask):
    (tmp_path / "model").mkdir()
    extra = {} if mask is None else {"mask_token_id": mask}
    write_config(model_preset(LOOKING_BOTH_WAYS), tmp_path / "model" / "config.json", dtype="float32", extra=extra)
    assert resolve_model(config_of(index, hf=str(tmp_path / "model")), None).mask_token_id == mask
    if mask is None:
        with pytest.raises(InputError, match=r'config\.json does not say .* add "mask_token_id"'):
            resolve(index, hf=str(tmp_path / "model"))
    else:
        assert resolve(index, hf=str(tmp_path / "model")).mask_token_id == 103


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["plan.method=metp", "plan.degree=3"],
            "plan.degree=3 does not divide the number of devices of the run, 4; .* 1, 2, 4, or .*--nproc",
        ),
        (["plan.method=dense", "plan.degree=2"], "plan.method=dense shares nothing: plan.degree must be 1, not 2"),
        (["plan.method=metp", "plan.max_degree=4"], "plan.method=metp needs plan.degree"),
        (
            ["plan.method=random", "plan.max_degree=1"],
            "plan.method=random needs plan.degree, .*; or leave plan.max_degree out",
        ),
        (
            ["train.compile=true", "plan.shapes=2", "plan.tile_tokens=5"],
            "train.compile=true with plan.tile_tokens=5: compiled layers compute all tokens at once",
        ),
        (["train.compile=true"], "train.compile=true compiles layers for fixed sizes, .* set plan.shapes"),
        (
            ["train.compile=true", "plan.shapes=4", "plan.method=metp", "plan.degree=2"],
            "plan.method=metp: layers whose weights are sharded are not compiled, .* ulysses, ring or dense",
        ),
        (
            ["plan.profile=p.json", "plan.degree=2"],
            "p.json was measured on one device and knows no cost of plan.degree=2",
        ),
        (
            ["plan.profile=p.json", "plan.max_degree=4", "plan.max_stages=2"],
            "p.json was measured on one device and knows no cost of plan.max_degree=4 and plan.max_stages=2",
        ),
    ],
)
def test_methods_and_degrees_that_do_not_go_together_are_refused(settings, message):
    config, cluster, spec = load(None, settings), cluster_preset("4xcpu"), model_preset("llama-tiny")
    cost = AnalyticCost(model=spec, cluster=cluster, dtype="float32")
    with pytest.raises(InputError, match=message):
        make_planner(config, cost, spec=spec, cluster=cluster, corpus=TWO_SEQUENCES)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)}),
        (["plan.max_degree=4", "plan.max_stages=1"], {(1, 1), (2, 1), (4, 1)}),
        (["plan.max_stages=2"], {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)}),
        (["plan.max_degree=1"], {(1, 1), (1, 2), (1, 4)}),
        (["plan.degree=2", "plan.max_stages=2"], {(2, 1), (2, 2)}),
        (["plan.max_degree=2", "plan.max_stages=2"], {(1, 1), (2, 1), (1, 2), (2, 2)}),
    ],
)
def test_degree_and_stages_are_those_of_the_cluster_unless_settings_limit_them(settings, expected):
    config, cluster, spec = load(None, settings), cluster_preset("4xcpu"), model_preset("llama-tiny")
    cost = AnalyticCost(model=spec, cluster=cluster, dtype="float32")
    planner = make_planner(config, cost, spec=spec, cluster=cluster, corpus=TWO_SEQUENCES)
    schemes = [kind.scheme for kind in planner.problem.candidates]
    assert {(scheme.degree, scheme.num_stages) for scheme in schemes} == expected
    if expected - {(1, 1), (1, 2), (1, 4)}:
        assert {method for scheme in schemes for method in scheme.methods} >= {"ulysses", "ring", "megatron_ts"}


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(
    ("settings", "splits", "places"),
    [
        ([], True, False),
        (["plan.zero_bubble=none", "plan.local_sequences=true"], False, True),
        (["train.schedule=gpipe"], False, False),
        (["train.compile=true", "plan.shapes=2", "plan.local_sequences=true"], False, False),
        (["model.preset=bert-tiny", "plan.local_sequences=true"], True, False),
    ],
)
def test_stages_split_backwards_and_ranks_have_whole_sequences_where_runs_can(settings, splits, places):
    config, cluster = load(None, ["model.preset=llama-tiny", *settings]), cluster_preset("4xcpu")
    spec = model_preset(config.model.preset)
    cost = AnalyticCost(model=spec, cluster=cluster, dtype="float32")
    problem = make_planner(config, cost, spec=spec, cluster=cluster, corpus=TWO_SEQUENCES).problem
    assert any(candidate.scheme.zero_bubble for candidate in problem.candidates) == splits
    assert problem.local_sequences == places


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
def test_policies_are_tuned_on_batches_that_the_run_does_not_compute(order):
    """Random ones, whatever the order: a sorted run's first batches are alike."""
    lengths = LengthIndex(lengths=synthetic_lengths("commoncrawl", 3000, 0))
    view = apply_max_length(lengths, max_length=None, rule="error")
    corpus = Corpus(parts=(CorpusPart(name="made up", store=SimpleNamespace(has_loss_mask=False), view=view),))
    config = load(None, ["data.sequences_per_step=50", "plan.policy=static", f"data.order={order}"])
    cluster, spec = cluster_preset("4xcpu"), model_preset("llama-tiny")
    cost = AnalyticCost(model=spec, cluster=cluster, dtype="float32")
    samples = make_planner(config, cost, spec=spec, cluster=cluster, corpus=corpus).problem.samples
    sampler = make_sampler(config, corpus)
    computed = [np.array(next(sampler).lengths) for _ in samples]
    assert samples and not any(np.array_equal(sample, batch) for sample in samples for batch in computed)
    assert max(map(np.mean, samples)) < 4 * min(map(np.mean, samples))


def test_compiled_runs_plan_a_few_sizes_that_divide_by_every_degree_with_methods_that_are_compiled():
    settings = ["plan.policy=packed", "plan.shapes=2", "train.compile=true", "plan.max_degree=4"]
    config, cluster, spec = load(None, settings), cluster_preset("4xcpu"), model_preset("llama-tiny")
    cost = AnalyticCost(model=spec, cluster=cluster, dtype="float32")
    planner = make_planner(config, cost, spec=spec, cluster=cluster, corpus=TWO_SEQUENCES)
    assert {m for kind in planner.problem.candidates for m in kind.scheme.methods} == {"dense", "ulysses", "ring"}
    sizes = planner.problem.lattice.sizes
    assert len(sizes) <= 2 and all(size % 256 == 0 for size in sizes)
    assert set(sizes_of(config, planner)) == {size // degree for size in sizes for degree in (1, 2, 4)}
    assert sizes_of(load(None, settings[:2]), planner) == ()


def test_plans_of_a_run_hide_the_share_of_the_update_that_its_settings_name():
    cluster, spec, batch = (
        cluster_preset("4xcpu"),
        model_preset("llama-tiny"),
        GlobalBatch(step=0, ids=(0, 1), lengths=(5, 9)),
    )
    plans = []
    for settings in ([], ["plan.overlap=1"]):
        config = load(None, ["plan.policy=packed", *settings])
        cost = CorrectedCost(make_cost(config, spec, cluster))  # as training has it
        plans.append(make_planner(config, cost, spec=spec, cluster=cluster, corpus=TWO_SEQUENCES)(batch))
    shown, hidden = plans
    assert shown.pipelines == hidden.pipelines and hidden.update_s < shown.update_s
    assert simulate(shown, SimOptions(overlap=1.0)).step_time_s == pytest.approx(hidden.time_s)
    with pytest.raises(InputError, match=r"plan\.overlap"):
        load(None, ["plan.overlap=1.5"])


def test_compiled_runs_from_a_file_of_plans_need_as_few_sizes_in_it(tmp_path):
    config, cluster, spec = load(None, ["plan.policy=packed"]), cluster_preset("4xcpu"), model_preset("llama-tiny")
    cost = AnalyticCost(model=spec, cluster=cluster, dtype="float32")
    planner = make_planner(config, cost, spec=spec, cluster=cluster, corpus=TWO_SEQUENCES)
    plan = planner(GlobalBatch(step=0, ids=(0, 1), lengths=(5, 9)))
    (tmp_path / "p.jsonl").write_text(json.dumps(plan.to_json()) + "\n")
    settings = ["train.compile=true", "train.steps=1", f"plan.file={tmp_path}/p.jsonl"]
    plans = open_plans(load(None, settings))
    wanted = {m.pack.num_tokens for pipeline in plan.pipelines for m in pipeline.micro_batches}
    with pytest.raises(InputError, match=rf"have {len(wanted)} sizes of micro-batches, plan.shapes allows 0"):
        sizes_of(load(None, settings), plans)
    assert set(sizes_of(load(None, [*settings, "plan.shapes=2"]), plans)) == wanted


def test_a_run_folder_with_a_space_is_no_place_for_compiled_code(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, "/elsewhere")  # put back what it was
    monkeypatch.delenv(CACHE_VARIABLE)
    world = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    with pytest.raises(InputError, match=rf"my run/compiler', .* name another place in {CACHE_VARIABLE}"):
        compiled_layers((64,), world, RunFolder(tmp_path / "my run"), None)
    assert compiled_layers((), world, RunFolder(tmp_path / "my run"), None) is None


@pytest.mark.parametrize("setting", ["plan.method=ring", "plan.degree=2"])
def test_a_file_of_plans_is_executed_as_it_is(setting):
    with pytest.raises(InputError, match=rf"plan.file=p.jsonl holds plans that are executed as they are; {setting}"):
        open_plans(load(None, ["plan.file=p.jsonl", setting]))


def test_a_model_that_is_no_folder_or_of_another_family_is_told_what_trains_it(tmp_path):
    with pytest.raises(InputError, match=r"model\.hf='Qwen/Qwen3-4B' is no folder; download .* lengthwise\.Trainer"):
        resolve_model(check({"model": {"hf": "Qwen/Qwen3-4B"}}), None)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    with pytest.raises(InputError, match=r"Qwen3ForCausalLM.* is not supported; .*lengthwise\.prepare and lengthwise"):
        resolve_model(check({"model": {"hf": str(tmp_path)}}), None)
    (tmp_path / "adapter_config.json").write_text("{}")
    for find in (
        partial(resolve_model, check({"model": {"hf": str(tmp_path)}}), None),
        partial(find_reference, tmp_path),
    ):
        with pytest.raises(InputError, match=r"has an adapter of peft \(adapter_config\.json\).*merge_and_unload"):
            find()


def test_a_profile_of_shared_micro_batches_lets_plans_share_the_longest(tmp_path):
    """One sequence is longer than half of the step, and two ranks compute it faster together."""
    spec = resolve_model(check({}), None)
    alone, shared = (
        tuple(
            ProfileRow(lengths=(n,), time_s=(n + n * n / 1000) * 1e-4 / speed, spread_s=0.0, kept_bytes=n)
            for n in (512, 1024, 2048, 4096)
        )
        for speed in (1, 1.8)
    )
    ProfileTable(
        model_digest=spec.digest, model_name=spec.name, device="cpu", dtype="float32", recompute=False, num_ranks=2,
        update_s=0.0, rows=alone, shared=(SharedRows(degree=2, method="ulysses", rows=shared),),
    ).save(tmp_path / "profile.json")  # fmt: skip
    config = check({"plan": {"profile": str(tmp_path / "profile.json")}, "data": {"sequences_per_step": 3}})
    view = apply_max_length(LengthIndex(lengths=np.array([4096, 100, 90])), max_length=None, rule="error")
    corpus = Corpus(parts=(CorpusPart(name="a", store=SimpleNamespace(has_loss_mask=False), view=view),))
    cluster = cluster_preset("2xcpu")
    cost = make_cost(config, spec, cluster)
    planner = make_planner(config, cost, spec=spec, cluster=cluster, corpus=corpus)
    plan = planner(GlobalBatch(step=0, ids=(0, 1, 2), lengths=(4096, 100, 90)))
    schemes = {id: p.scheme for p in plan.pipelines for m in p.micro_batches for id in m.pack.ids}
    assert schemes[0].degree == 2 and set(schemes[0].methods) == {"ulysses"}
    for name in ("degree", "max_degree"):
        limited = config.model_copy(update={"plan": config.plan.model_copy(update={name: 4})})
        with pytest.raises(
            InputError, match=rf"up to 2 devices that share a layer and knows no cost of plan\.{name}=4"
        ):
            make_planner(limited, cost, spec=spec, cluster=cluster_preset("4xcpu"), corpus=corpus)


@pytest.mark.parametrize(
    ("settings", "num_ranks", "expected"),
    [
        ([], 2, [(2, "ulysses"), (2, "ring"), (2, "megatron_ts")]),
        (["plan.method=ring", "plan.degree=2"], 4, [(2, "ring")]),
        (["plan.max_degree=1"], 4, []),
        ([], 1, []),
    ],
)
def test_a_profile_has_every_degree_and_method_that_plans_may_use(settings, num_ranks, expected):
    spec = model_preset("llama-tiny")
    assert shared_schemes(load(None, settings), spec, num_ranks=num_ranks, per_node=num_ranks) == expected


def test_a_profile_of_one_degree_is_of_that_alone_and_refuses_what_cannot_be():
    spec = replace(model_preset("llama-tiny"), num_heads=2, num_kv_heads=2)

    def shared(*settings):
        return shared_schemes(load(None, list(settings)), spec, num_ranks=4, per_node=4)

    assert shared("plan.degree=4", "plan.methods=[ring, metp]") == [(4, "ring"), (4, "metp")]
    assert shared("plan.degree=1") == []
    with pytest.raises(InputError, match=r"plan.degree=3: 4 ranks can share layers by 1, 2, 4; choose one of these"):
        shared("plan.degree=3")
    with pytest.raises(InputError, match=r"shares the layers of .* by megatron_ts, for it has 2 heads and 2 key/value"):
        shared("plan.degree=4", "plan.methods=[megatron_ts]")


def test_lengths_to_profile_are_listed_or_quantiles_of_the_data(tmp_path):
    np.save(tmp_path / "lengths.npy", np.arange(1, 1001))
    build(tmp_path / "lengths.npy", tmp_path / "index")
    config = load(None, [f"data.index={tmp_path / 'index'}"])
    assert packs_to_measure(config, "256,1K") == [(256,), (1000,), (256,) * 3]
    singles = [pack[0] for pack in packs_to_measure(config, "quantiles:5") if len(pack) == 1]
    assert singles == [32, 251, 501, 751, 1000]
    assert len([pack for pack in packs_to_measure(config, "quantiles") if len(pack) == 1]) == 8
    for words, problem in {
        "many": "is no list of lengths", "16,64": "is no list of lengths", "64": "name two lengths",
        "64,65,66": "packs of 64 to 66 tokens alone; .* one of at least 1.5 times as many",
        "quantiles:1": "number of quantiles is from 2",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=problem):
            packs_to_measure(config, words)
    with pytest.raises(InputError, match=r"a ladder up to 50 tokens: 2 rows, .*; raise --max-length or --max-tokens"):
        packs_to_measure(config, None, max_length=50)
    with pytest.raises(InputError, match="leave --max-length out"):
        packs_to_measure(config, "64,128", max_length=128)
    with pytest.raises(InputError, match=r"set data\.index"):
        packs_to_measure(load(None, []), "quantiles")


def test_a_profile_leaves_out_methods_that_a_model_has_too_few_heads_for():
    spec = replace(model_preset("llama-tiny"), num_heads=2, num_kv_heads=2)
    shared = shared_schemes(load(None, []), spec, num_ranks=4, per_node=4)
    assert shared == [(2, "ulysses"), (2, "ring"), (2, "megatron_ts"), (4, "ulysses"), (4, "ring")]


def test_links_that_were_measured_take_the_place_of_those_of_the_data_sheet(tmp_path):
    links = LinkSpeeds(within=LinkSpeed(call_s=0.5, bytes_per_s=4e6), across=None)
    cluster = with_measured_links(cluster_preset("2xcpu"), links)
    assert (call_s(2, cluster), collective_bytes_per_s(2, cluster)) == (0.5, pytest.approx(4e6))
    assert cluster.device.network_call_s == cluster_preset("2xcpu").device.network_call_s
    to_host = LinkSpeeds(within=None, across=None, host=LinkSpeed(call_s=2e-5, bytes_per_s=2e10))
    gpus = with_measured_links(cluster_preset("2xH100-80GB"), to_host)
    assert host_copy_bytes_per_s(gpus) == pytest.approx(2e10)
    assert with_measured_links(cluster, None) == cluster


def planned_state(longest, *overrides):
    """The place of the optimizer's state once a 7B is planned on two H100s, and the longest sequence that fits."""
    settings = ["cluster.name=2xH100-80GB", "plan.max_stages=1", "train.dtype=bfloat16", *overrides]
    config = load(None, settings)
    spec, cluster = model_preset("llama-7b"), resolve_cluster(config)
    part = replace(
        TWO_SEQUENCES.parts[0],
        view=apply_max_length(LengthIndex(lengths=np.array([5, longest])), max_length=None, rule="error"),
    )
    cost = make_cost(config, spec, cluster)
    planner = make_planner(config, cost, spec=spec, cluster=cluster, corpus=Corpus(parts=(part,)))
    return with_planned_state(config, planner.problem).train.offload_state, planner.problem.leanest.max_tokens


def test_the_state_moves_to_the_host_where_the_longest_sequence_needs_it():
    assert planned_state(1000, "train.offload_state=device")[0] == "device"
    assert planned_state(1000)[0] == "auto"
    with pytest.raises(InfeasibleError):
        planned_state(400_000, "train.offload_state=device")
    place, longest = planned_state(400_000)
    assert place == "host" and longest >= 400_000


def test_layers_that_are_compiled_are_planned_without_tiles():
    def has_tiles(*overrides):
        given = ["cluster.name=2xH100-80GB", "plan.max_stages=1", "train.dtype=bfloat16", "plan.policy=static"]
        config = load(None, [*given, *overrides])
        spec, cluster = replace(model_preset("llama-7b"), num_layers=16), resolve_cluster(config)
        view = apply_max_length(LengthIndex(lengths=np.array([5, 300_000])), max_length=None, rule="error")
        corpus = Corpus(parts=(replace(TWO_SEQUENCES.parts[0], view=view),))
        cost = make_cost(config, spec, cluster)
        problem = make_planner(config, cost, spec=spec, cluster=cluster, corpus=corpus).problem
        return any(candidate.scheme.tile_tokens for candidate in problem.candidates)

    assert has_tiles() and not has_tiles("train.compile=true", "plan.shapes=2")
