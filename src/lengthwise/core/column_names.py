"""Names of columns of token ids and of what stands beside them, for ``lengthwise index`` and ``lengthwise.prepare``."""

TOKENS = ("input_ids", "tokens", "ids")
LABELS, IGNORED = ("labels", "label_ids", "label"), -100
"""Columns of each token's label, of which a row's first counts; the label of a token that has no loss."""
LOSS_MASKS = (
    "completion_mask", "assistant_masks", "assistant_mask", "assistant_tokens_mask", "loss_mask", "labels_mask",
    "label_mask", "target_mask", "response_mask",
)  # fmt: skip
"""Columns with 1 for each token that has a loss, as TRL and chat templates of transformers make them."""
PROMPT_MASK = "prompt_mask"
"""A column with 1 for each token of a prompt, which has no loss."""
PADDING = "attention_mask"
"""A column with 0 for each token of padding."""
POSITIONS = ("position_ids", "seq_idx", "seq_lengths")
"""Columns that say where the sequences of a row begin that was packed before."""
