"""What a run is validated on, and for how many steps it trains."""

from itertools import islice

import pytest

from lengthwise.config.run_config import check
from lengthwise.core.errors import InfeasibleError, InputError
from lengthwise.core.specs import cluster_preset
from lengthwise.data.corpus import open_corpus, open_validation
from lengthwise.session.planning import make_cost, make_planner, make_sampler, with_steps
from lengthwise.session.trained_model import resolve_model
from lengthwise.session.validation_set import validation_corpus, validation_plans
from tests.index.build import build, write_jsonl


@pytest.fixture
def index(tmp_path):
    """Make an index of texts of these sizes, each a token more; its folder."""

    def make(name: str, *sizes: int) -> str:
        texts = write_jsonl(tmp_path / f"{name}.jsonl", ["x" * size for size in sizes])
        return str(build(texts, tmp_path / name).path)

    return make


def config_of(data: dict, **train):
    return check({"data": {"tokens_per_step": 60, **data}, "train": train})


def test_epochs_are_counted_in_the_steps_that_their_batches_make(index):
    path = index("a", 10, 20, 30, 40, 50, 7, 8)
    config = config_of({"index": path}, epochs=3)
    resolved = with_steps(config, make_sampler(config, open_corpus(config.data)))
    sampler, batches = make_sampler(config, open_corpus(config.data)), 0
    while sampler.epoch < 3:
        next(sampler)
        batches += 1
    assert resolved.train.num_steps == batches > 3
    for train, steps in (({}, 100), ({"steps": 7}, 7)):
        config = config_of({"index": path}, **train)
        assert with_steps(config, make_sampler(config, open_corpus(config.data))).train.num_steps == steps


def test_a_share_is_held_out_of_every_part_and_never_trained_on(index):
    parts = [{"index": index(name, *range(5, 25)), "name": name} for name in "ab"]
    config = config_of({"mixture": parts, "validation_share": 0.2})
    trained, held = open_corpus(config.data), open_validation(config.data)
    for left, right in zip(trained.parts, held.parts):
        assert left.name == right.name and len(right.view.lengths) == 4 and len(left.view.lengths) == 16
        assert set(left.view.base_ids).isdisjoint(right.view.base_ids)
    other = open_validation(check({**config.model_dump(), "seed": 9}).data)
    assert other.lengths.digest == held.lengths.digest


def test_the_plans_of_validation_compute_each_of_its_sequences_once(index):
    data = {"index": index("a", *range(5, 30)), "validation": index("b", 3, 9, 27, 50, 11, 2)}
    config = check({
        "data": {"tokens_per_step": 60, "order": "sorted", **data}, "optim": {"lr_scaling": "linear"},
    })  # fmt: skip
    spec, cluster = resolve_model(config, open_corpus(config.data)), cluster_preset("2xcpu")
    corpus = validation_corpus(config, spec)

    def planner_of(config, corpus):
        return make_planner(config, make_cost(config, spec, cluster), spec=spec, cluster=cluster, corpus=corpus)

    plans = validation_plans(config, corpus, planner_of)()
    ids = [id for plan in plans for p in plan.pipelines for m in p.micro_batches for id in m.pack.ids]
    assert sorted(ids) == list(range(len(corpus))) and len(plans) > 1
    assert {plan.lr_factor for plan in plans} == {1.0}
    with pytest.raises(InfeasibleError, match=r"the validation set cannot be computed: .*exceeds plan\.max_tokens"):
        limited = config.model_copy(update={"plan": config.plan.model_copy(update={"max_tokens": 20})})
        validation_plans(limited, corpus, planner_of)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"validation": "ones", "max_length": 1, "over_length": "truncate"}, "2 sequences and no token with"),
        ({"validation": "b", "max_length": 40}, r"data\.validation: sequence 2 has 100 tokens, over"),
    ],
)
def test_what_cannot_be_validated_is_refused(index, data, message):
    indexes = {"b": index("b", 10, 20, 99), "ones": index("ones", 1, 1)}
    named = {**data, **({"validation": indexes[data["validation"]]} if "validation" in data else {})}
    config = config_of({"index": index("a", 10, 20, 30), **named})
    with pytest.raises(InputError, match=message):
        validation_corpus(config, resolve_model(config, None))


def test_validation_does_not_change_what_is_trained_at_which_step(index):
    data = {"index": index("a", *range(5, 30))}
    plain, validated = (config_of({**data, **more}) for more in ({}, {"validation": index("b", 9, 8)}))
    streams = [make_sampler(config, open_corpus(config.data)) for config in (plain, validated)]
    assert list(islice(streams[0], 20)) == list(islice(streams[1], 20))
