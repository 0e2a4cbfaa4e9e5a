"""Read every token of a corpus before it is trained on: an index whose files were changed since is refused."""

import os

from lengthwise.cli.launch import RUN_FOLDER_VARIABLE
from lengthwise.config.run_config import Config
from lengthwise.data.corpus import Corpus, open_corpus, open_validation
from lengthwise.index.store import TokenStore
from lengthwise.session.console import progress


def verify_corpus(config: Config, corpus: Corpus) -> None:
    """Raise ``CheckError`` unless all tokens are those that were indexed; nothing is read if ``data.verify`` is off."""
    if config.data.verify:
        for part in corpus.parts:
            verify_store(part.store, name=part.name)


def verify_store(store: TokenStore, *, name: str) -> None:
    """Raise ``CheckError`` unless all tokens of one index are those that were indexed; shows a progress bar."""
    with progress() as bar:
        task = bar.add_task(f"verify {name}", total=store.info["num_tokens"])
        store.verify_tokens(lambda num_tokens: bar.advance(task, num_tokens))


def verify_as_rank(config: Config) -> None:
    """Verify the corpus under bare torchrun, on one rank of each machine; `lengthwise train` does it for its ranks."""
    if RUN_FOLDER_VARIABLE in os.environ or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for corpus in (open_corpus(config.data), open_validation(config.data)):
        if corpus is not None:
            verify_corpus(config, corpus)
