"""The lines by which TRL, verl and OpenRLHF hand over their updates run, with stand-ins of their batches.

TRL itself is run by its examples and by ``tests/integrations/test_trl.py``, where it is installed.
"""

import sys

import pytest

from tests.docs.blocks import in_language
from tests.warm import Command

PAGE = "docs/guides/objectives.md"
STAND_INS = """
from abc import ABC
from types import SimpleNamespace


class Batch(dict):
    def split(self, size):
        return [Batch({name: values[k : k + size] for name, values in self.items()}) for k in range(0, len(ids), size)]


ids, response = batch["input_ids"], attention[:, 8:]
old_log_probs, advantage, examples = batch["old"], batch["advantage"], rows_of(**batch)
by_token = advantage[:, None].expand(-1, 10)
args = SimpleNamespace(learning_rate=1e-3, beta=0.1, num_iterations=2)
data, tokenizer, prompts, reward, micro_batches = (), None, None, None, []
rows = [{"prompt_ids": [1, 2, 3], "chosen_ids": [4] * k, "rejected_ids": [5, 6]} for k in range(1, 9)]


class trl:
    class DPOTrainer:
        def __init__(self, model, reference, args, train_dataset, processing_class):
            self.train_dataset = rows

    class GRPOTrainer:
        def __init__(self, model, reward_funcs, args, train_dataset):
            self.get_train_dataloader = lambda: [None, None]

        def _generate_and_score_completions(self, inputs):
            made = {"prompt_ids": ids[:, :8], "prompt_mask": attention[:, :8], "completion_ids": ids[:, 8:]}
            return made | {"completion_mask": response, "advantages": advantage}


class BasePPOActor:
    config = SimpleNamespace(ppo_mini_batch_size=2)


def append_to_dict(metrics, values):
    for name, value in values.items():
        metrics.setdefault(name, []).append(value)


def log_probabilities(model, micro_batch):
    return micro_batch.per_sequence(logps_t(model(**micro_batch.inputs), micro_batch))


def prepared():
    return lw.prepare(model, examples, loss_columns=("mask", "old", "advantage"), step_max_length=64)

"""
AFTER = {
    "trl.DPOTrainer": "assert run.next_step == 1\nrun.close()\n",
    "trl.GRPOTrainer": """
assert run.next_step == 4
row = items[0]
assert (row["old"][attention[0].bool()][1:] < 0).all() and not row["old"][~attention[0].bool()].any()
run.close()
""",
    "DataParallelPPOActor": """
actor = DataParallelPPOActor()
actor.run = prepared()
names = {"response_mask": response, "old_log_probs": old_log_probs, "advantages": by_token}
metrics = actor.update_policy(SimpleNamespace(batch=Batch(input_ids=ids, attention_mask=attention, **names)))
assert len(metrics["actor/grad_norm"]) == 2 and min(metrics["actor/grad_norm"]) > 0
actor.run.close()
""",
    "ActorPPOTrainer": """
names = {"action_mask": response, "action_log_probs": old_log_probs, "advantages": by_token}
micro_batches = [(SimpleNamespace(sequences=ids, attention_mask=attention, **names), None)] * 2
trainer = ActorPPOTrainer()
trainer.run = prepared()
assert [status["metrics"]["actor_lr"] for status in trainer.ppo_train(0.0)] == [3e-4] * 2
trainer.run.close()
""",
}
"""What has to be so after the block that names this."""


def page_script():
    """The first block of the page, and the one that all four trainers share."""
    blocks = [block.text for block in in_language("python") if block.page == PAGE]
    (shared,) = (text for text in blocks if "def rows_of(" in text)
    return blocks[0] + shared


@pytest.mark.deep
def test_what_others_add_runs(tmp_path):
    diffs = [block.text for block in in_language("diff") if block.page == PAGE]
    assert len(diffs) == len(AFTER)
    script = page_script() + STAND_INS
    for (name, after), diff in zip(AFTER.items(), diffs, strict=True):
        lines = diff.splitlines()
        assert name in diff and sum(line[:1] in "+-" for line in lines) <= 30
        script += "\n".join(line[1:] for line in lines if line[:1] in ("+", " ", "")) + "\n" + after
    (tmp_path / "trainers.py").write_text(script)
    out = tmp_path / "out"
    home = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    assert Command(tmp_path / "trainers.py", out=out, variables=home).wait(120) == 0, out.read_text()
