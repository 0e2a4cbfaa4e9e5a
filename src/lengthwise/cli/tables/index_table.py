"""What `lengthwise index` prints."""

from lengthwise.core.atomic_write import shell_word
from lengthwise.core.wording import counted
from lengthwise.index.build import BuiltIndex
from lengthwise.index.skipped import REASONS
from lengthwise.index.store import TokenStore
from lengthwise.session.console import stderr

_MOST_NAMED = 16
"""Columns that are named of those not used."""


def print_index(store: TokenStore, built: BuiltIndex, *, shows_next: bool = True) -> None:
    """Print what an index holds and what was left out of it; ``shows_next``: and what comes next."""
    lines = []
    info = store.info
    if built.was_up_to_date:
        lines.append(f"{store.path} is up to date, nothing to do")
    elif built.num_resumed_units:
        lines.append(f"went on with an interrupted build: {built.num_resumed_units:,} finished parts were kept")
    vocabulary = f", vocabulary {info['vocab_size']:,}" if store.has_tokens else ", lengths alone"
    lines.append(
        f"{counted(info['num_sequences'], 'sequence')}, {counted(info['num_tokens'], 'token')}, longest "
        f"{info['max_length']:,}"
        f"{vocabulary} (digest {store.digest})"
    )
    if store.has_loss_mask:
        lines.append(f"  {info['num_loss_tokens']:,} of {counted(info['num_tokens'], 'token')} have a loss")
    if count := info.get("documents_spelling_special_tokens"):
        spelled = counted(count, "document")
        lines.append(f"  special tokens spelled in {spelled} became plain letters; --chat recognises them")
    if unused := info.get("unused_columns"):
        more = f" and {len(unused) - _MOST_NAMED} more" if len(unused) > _MOST_NAMED else ""
        lines.append(f"  columns not used: {', '.join(unused[:_MOST_NAMED])}{more}")
    for reason in REASONS:
        if count := info["ledger"].get(reason):
            left_out = f"{counted(count, 'document')} ({reason})"
            lines.append(f"  left out: {left_out}, such as {info['ledger']['examples'][reason][0]}")
    if shows_next:
        lines.append(f"next: lengthwise stats {shell_word(store.path)}")
    stderr().print("\n".join(lines), markup=False, soft_wrap=True)


def print_verified(store: TokenStore) -> None:
    """Print that every token is the one that was indexed."""
    words = f"{store.path}: {counted(len(store), 'sequence')}, all as indexed (digest {store.digest})"
    stderr().print(words, markup=False, soft_wrap=True)
