"""Chats in an index are what transformers makes of them with the tokenizer's own template, token by token."""

import json

import pytest
import torch

from lengthwise.config.run_config import DataConfig, PartConfig
from lengthwise.core.errors import InputError
from lengthwise.core.run_folder import RunFolder
from lengthwise.data.corpus import open_corpus
from lengthwise.index.store import open_index
from tests.chats import TEMPLATE, write_model, write_tokenizer
from tests.cli.runs import lengthwise
from tests.index.build import build, files_of, places_of
from tests.index.test_loss_mask import write_rows

transformers = pytest.importorskip("transformers")


def turn(role, content):
    return {"role": role, "content": content}


CHATS = [
    [turn("user", "How long is a coast?"), turn("assistant", "It depends, é, on the ruler.")],
    [
        turn("system", "Be brief."),
        turn("user", "Hi"),
        turn("assistant", "Hé"),
        turn("user", "?"),
        turn("assistant", "!"),
    ],
    [turn("user", "one"), turn("assistant", "two"), turn("user", "and nobody answers")],
    [turn("user", "special words <|im_end|> in a question"), turn("assistant", "")],
] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


def ids_and_answer(tokenizer, messages, answer):
    """All ids of a chat by transformers, and those of its answer, which begins where the prompt's ids end."""
    ids = tokenizer.apply_chat_template(messages)["input_ids"]
    start = len(tokenizer.apply_chat_template(messages[:answer], add_generation_prompt=True)["input_ids"])
    stop = len(tokenizer.apply_chat_template(messages[: answer + 1])["input_ids"])
    return ids, [start <= k < stop for k in range(len(ids))]


def contents(store):
    return [(store.tokens(id).tolist(), store.loss_mask(id).tolist()) for id in range(len(store))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_the_last_answer_has_a_loss(folder, tokenizer, tmp_path, name):
    source = write_rows(tmp_path / name, messages=CHATS)
    store = build(source, tmp_path / "out", tokenizer=str(folder), unit_bytes=1000)
    last = [max(k for k, message in enumerate(chat) if message["role"] == "assistant") for chat in CHATS]
    assert contents(store) == [ids_and_answer(tokenizer, chat, answer) for chat, answer in zip(CHATS, last)]
    assert store.tokens(0)[0] == 257, "<|im_start|> is one token"
    assert (store.eos_id, store.info["vocab_size"]) == (None, 260)
    store.verify_tokens()
    assert len(places_of(store)) == len(CHATS)
    assert (store.path / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_chats_of_sharegpt_are_the_same_tokens(folder, tmp_path, name):
    speakers = {"user": "human", "assistant": "gpt"}
    rows = [[{"from": speakers.get(m["role"], m["role"]), "value": m["content"]} for m in chat] for chat in CHATS]
    stores = [
        build(write_rows(tmp_path / f"{field}-{name}", **{field: chats}), tmp_path / field, tokenizer=str(folder))
        for field, chats in (("messages", CHATS), ("conversations", rows))
    ]
    assert contents(stores[0]) == contents(stores[1])


def test_every_answer_has_a_loss_by_the_mask_of_the_template(folder, tokenizer, tmp_path):
    source = write_rows(tmp_path / "a.jsonl", messages=CHATS)
    store = build(source, tmp_path / "out", tokenizer=str(folder), loss="assistant")
    for id, chat in enumerate(CHATS):
        encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert store.tokens(id).tolist() == encoded["input_ids"]
        assert store.loss_mask(id).tolist() == [bool(value) for value in encoded["assistant_masks"]]
    every = build(source, tmp_path / "all", tokenizer=str(folder), loss="all")
    assert not every.has_loss_mask
    assert [every.tokens(id).tolist() for id in range(3)] == [store.tokens(id).tolist() for id in range(3)]


def test_prompt_and_completion_are_messages_or_text(folder, tokenizer, tmp_path):
    talks = write_rows(tmp_path / "a.jsonl", prompt=[chat[:1] for chat in CHATS[:1]], completion=[CHATS[0][1:]])
    store = build(talks, tmp_path / "talks", tokenizer=str(folder))
    assert contents(store) == [ids_and_answer(tokenizer, CHATS[0], 1)]
    texts = write_rows(tmp_path / "b.jsonl", prompt=["Q: ä?\nA:", "no"], completion=[" <|im_start|>é", " more"])
    store = build(texts, tmp_path / "texts", tokenizer=str(folder))
    expected = []
    for prompt, completion in (("Q: ä?\nA:", " <|im_start|>é"), ("no", " more")):
        before, ids = tokenizer(prompt)["input_ids"], [*tokenizer(prompt + completion)["input_ids"], 258]
        expected.append((ids, [k >= len(before) for k in range(len(ids))]))
    assert contents(store) == expected and store.eos_id == 258
    without = build(texts, tmp_path / "without", tokenizer=str(folder), append_eos=False)
    assert without.tokens(0).tolist() == expected[0][0][:-1] and without.eos_id is None


@pytest.mark.parametrize("kind", ["ByteLevel", "Sequence", "RobertaProcessing"])
def test_whitespace_has_a_loss_also_where_a_tokenizer_trims_its_offsets(folder, tmp_path, kind):
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    trimming = processors.ByteLevel(trim_offsets=True)
    pad = ("<pad>", tokenizer.token_to_id("<pad>"))
    tokenizer.post_processor = {
        "ByteLevel": trimming,
        "Sequence": processors.Sequence([trimming, processors.TemplateProcessing(single="$A")]),
        "RobertaProcessing": processors.RobertaProcessing(pad, pad, trim_offsets=True),
    }[kind]
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    rows = {"prompt": ["ab", "ab ", "ab  "], "completion": ["yes  ", " ", "  yes"]}
    source = write_rows(tmp_path / "a.jsonl", **rows)
    store = build(source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), append_eos=False)
    for id, (prompt, completion) in enumerate(zip(*rows.values())):
        added = [[False]] * 2 if kind == "RobertaProcessing" else [[], []]
        assert store.loss_mask(id).tolist() == [*added[0], *[False] * len(prompt), *[True] * len(completion), *added[1]]


def test_a_conversation_without_messages_is_empty_like_null(folder, tmp_path):
    rows = [[], CHATS[0], None, []]
    for name in ("a.jsonl", "a.parquet"):
        source = write_rows(tmp_path / name, messages=rows)
        for loss in ("", "assistant"):
            store = build(source, tmp_path / f"{loss}-{name}.index", tokenizer=str(folder), loss=loss, on_empty="drop")
            assert (len(store), store.info["ledger"]["empty"]) == (1, 3)
        with pytest.raises(InputError, match=r"(:1|row 0) is empty"):
            build(source, tmp_path / "refused", tokenizer=str(folder))
    source = write_rows(tmp_path / "b.jsonl", prompt=[CHATS[0][:1], CHATS[0][:1]], completion=[[], CHATS[0][1:]])
    assert len(build(source, tmp_path / "pairs", tokenizer=str(folder), on_empty="drop")) == 1


def test_templated_text_keeps_its_special_tokens(folder, tokenizer, tmp_path):
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in CHATS]
    source = write_rows(tmp_path / "a.jsonl", text=texts)
    store = build(source, tmp_path / "chats", tokenizer=str(folder), chat=True)
    expected = [tokenizer.apply_chat_template(chat)["input_ids"] for chat in CHATS]
    assert [store.tokens(id).tolist() for id in range(len(store))] == expected and not store.has_loss_mask
    as_text = build(source, tmp_path / "text", tokenizer=str(folder), append_eos=False)
    assert len(as_text.tokens(0)) > len(expected[0])
    told = lengthwise("index", source, "--tokenizer", folder, "--out", tmp_path / "told").stderr
    assert f"special tokens spelled in {len(CHATS)} documents became plain letters; --chat recognises them" in told
    assert "documents_spelling_special_tokens" not in store.info
    with pytest.raises(InputError, match="--loss completions: 'text' holds text, whose turns are not known"):
        build(source, tmp_path / "out", tokenizer=str(folder), chat=True, loss="completions")


@pytest.mark.deep
def test_workers_change_no_byte_and_the_template_is_part_of_the_request(folder, tmp_path):
    source = write_rows(tmp_path / "a.jsonl", messages=CHATS * 20)
    one = files_of(build(source, tmp_path / "one", tokenizer=str(folder), unit_bytes=4000).path)
    two = build(source, tmp_path / "two", tokenizer=str(folder), unit_bytes=4000, workers=2)
    assert files_of(two.path) == one
    write_tokenizer(tmp_path / "other", template=TEMPLATE + "bye")
    with pytest.raises(InputError, match="holds another index"):
        build(source, tmp_path / "two", tokenizer=str(tmp_path / "other"), unit_bytes=4000)
    with pytest.raises(InputError, match=r"holds another index \(loss: 'completions' then, 'all' now"):
        build(source, tmp_path / "two", tokenizer=str(folder), unit_bytes=4000, loss="all")


def test_tools_reach_the_template(tmp_path):
    write_tokenizer(tmp_path / "tools", template="{{ tools[0]['name'] }}: " + TEMPLATE)
    source = write_rows(tmp_path / "a.jsonl", messages=CHATS[:1], tools=[[{"name": "ruler"}]])
    store = build(source, tmp_path / "out", tokenizer=str(tmp_path / "tools"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tools")
    assert tokenizer.decode(store.tokens(0)).startswith("ruler: <|im_start|>user")


THINKING = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)


@pytest.mark.parametrize(
    ("chats", "template", "options", "words"),
    [
        (
            [CHATS[0], [turn("user", "alone")]],
            TEMPLATE,
            {},
            "a.jsonl:2 has no token with a loss: there is no turn of the",
        ),
        ([CHATS[0]], THINKING, {}, "a.jsonl:1: the chat template renders what comes before the last answer otherwise"),
        ([CHATS[0]], THINKING, {"loss": "assistant"}, "does not mark what the assistant generates"),
        ([CHATS[0]], "", {}, "the tokenizer has no chat template"),
        (
            [CHATS[0]],
            "{{ raise_exception('roles must alternate') }}",
            {},
            "a.jsonl:1: .* cannot render it: roles must alt",
        ),
        (
            [CHATS[0], ["hello"]],
            TEMPLATE,
            {},
            "a.jsonl:2: 'messages' must be a list of messages, each with role and cont",
        ),
        (
            [CHATS[0]],
            TEMPLATE,
            {"tokenizer": "bytes"},
            "holds chats, and the tokenizer is bytes; give --tokenizer with",
        ),
    ],
)
def test_what_is_no_chat_is_refused(tmp_path, chats, template, options, words):
    write_tokenizer(tmp_path / "tokenizer", template=template)
    source = write_rows(tmp_path / "a.jsonl", messages=chats)
    with pytest.raises(InputError, match=words):
        build(source, tmp_path / "out", **{"tokenizer": str(tmp_path / "tokenizer"), **options})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_options_of_a_row_reach_the_template(tmp_path, name):
    write_tokenizer(tmp_path / "t", template="{% if thinking %}T{% endif %}{% if more %}M{% endif %}" + TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "t")
    options = [{"thinking": True}, {"thinking": False, "more": 1}, None]
    rows = {"messages": CHATS[:1] * 3, "chat_template_kwargs": options}
    store = build(write_rows(tmp_path / name, **rows), tmp_path / "out", tokenizer=str(tmp_path / "t"))
    expected = [tokenizer.apply_chat_template(CHATS[0], **(given or {}))["input_ids"] for given in options]
    assert [store.tokens(id).tolist() for id in range(3)] == expected
    without = build(tmp_path / name, tmp_path / "no", tokenizer=str(tmp_path / "t"), ignore=("chat_template_kwargs",))
    assert [without.tokens(id).tolist() for id in range(3)] == expected[2:] * 3


ASKED = {"messages": CHATS[0]}
NOT_TEXT = {
    "images": ({**ASKED, "images": ["a.png"]}, "'images' holds what is no text.*--ignore images"),
    "sound": ({**ASKED, "audio": {"path": "a.wav"}}, "'audio' holds what is no text"),
    "a part": (
        {"messages": [turn("user", [{"type": "image_url", "url": "a"}, {"type": "text", "text": "b"}]), CHATS[0][1]]},
        "'messages' has a part of type 'image_url'",
    ),
    "an unwanted completion": ({"prompt": "a", "completion": "b", "label": False}, "'label' is false.*--ignore label"),
    "an option of ours": ({**ASKED, "chat_template_kwargs": {"tokenize": True}}, "template's own options, none of"),
    "options that are text": ({**ASKED, "chat_template_kwargs": "thinking"}, "is to be an object"),
    "preferences": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "'chosen' and 'rejected': an index has no pairs"),
}


@pytest.mark.parametrize(("row", "said"), NOT_TEXT.values(), ids=NOT_TEXT)
def test_what_chats_cannot_keep_is_refused_by_name(folder, tmp_path, row, said):
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=said):
        build(source, tmp_path / "out", tokenizer=str(folder))
    if "--ignore" in said:
        assert len(build(source, tmp_path / "in", tokenizer=str(folder), ignore=(said.rpartition(" ")[2],))) == 1


def test_rows_with_text_stay_text_and_loss_is_of_chats(folder, tmp_path):
    source = write_rows(tmp_path / "a.jsonl", text=["a", "b"], messages=CHATS[:2])
    assert build(source, tmp_path / "text").tokens(0).tolist() == [97, 256]
    assert build(source, tmp_path / "chats", tokenizer=str(folder), chat=True).has_loss_mask
    assert build(source, tmp_path / "field", tokenizer=str(folder), field="messages").has_loss_mask
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps({"text": "a"}) + "\n")
    with pytest.raises(InputError, match="--loss assistant is of chats, and rows are none"):
        build(tmp_path / "b.jsonl", tmp_path / "out", loss="assistant")
    (tmp_path / "c.txt").write_text("a")
    with pytest.raises(InputError, match="--chat reads rows of JSON lines, Parquet or Arrow"):
        build(tmp_path / "c.txt", tmp_path / "out", chat=True)


def test_chats_and_text_of_one_tokenizer_mix(folder, tmp_path):
    chats = build(write_rows(tmp_path / "a.jsonl", messages=CHATS), tmp_path / "chats", tokenizer=str(folder))
    texts = build(write_rows(tmp_path / "b.jsonl", text=["some", "text"]), tmp_path / "text", tokenizer=str(folder))
    corpus = open_corpus(DataConfig(mixture=(PartConfig(index=str(chats.path)), PartConfig(index=str(texts.path)))))
    assert corpus.lengths.targets.sum() == chats.info["num_loss_tokens"] + len("some") + len("text")
    assert corpus.loss_mask(0).tolist() == chats.loss_mask(0).tolist() and corpus.loss_mask(len(chats)) is None


FLOAT32_ANGLES = 1e-5
"""transformers rounds rotary angles and norms to float32."""


def test_a_chat_model_is_tuned_and_exported_with_the_loss_of_transformers(tmp_path):
    write_model(tmp_path / "chatty")
    write_rows(tmp_path / "chats.jsonl", messages=CHATS[:3])
    told = lengthwise(
        "index", tmp_path / "chats.jsonl", "--tokenizer", tmp_path / "chatty", "--out", tmp_path / "chats"
    )
    store = open_index(tmp_path / "chats")
    assert f"{store.info['num_loss_tokens']} of {store.info['num_tokens']} tokens have a loss" in told.stderr
    lengthwise(
        "train", f"data.index={store.path}", f"model.hf={tmp_path / 'chatty'}", "train.steps=1", "train.dtype=float64",
        f"run_folder={tmp_path / 'run'}",
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "chatty", dtype=torch.float64)
    total = count = 0.0
    for tokens, mask in contents(store):
        labels = torch.tensor([token if has_loss else -100 for token, has_loss in zip(tokens, mask)])
        number = int((labels[1:] != -100).sum())
        total += model(torch.tensor([tokens]), labels=labels[None]).loss.item() * number
        count += number
    (row,) = RunFolder(tmp_path / "run").read_metrics()
    assert row["loss/avg"] == pytest.approx(total / count, rel=FLOAT32_ANGLES)
    assert count == store.info["num_loss_tokens"]
    lengthwise("export", tmp_path / "run", "--out", tmp_path / "tuned")
    tuned = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")
    assert tuned.apply_chat_template(CHATS[0])["input_ids"] == store.tokens(0).tolist()
