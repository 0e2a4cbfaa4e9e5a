"""What one layer costs each of the p devices that share it: FLOPs, bytes sent by collective, bytes kept. Closed forms.

T tokens of the pack, l of one sequence, p devices, D hidden size, N query and K key/value heads, H head size, F feed-
forward size, w bytes of the compute dtype, m of the master dtype, W = D (2 N + 2 K) H + 3 D F weights (2 D F ungated).

Every method takes and returns T / p tokens of D numbers per device. Multiplying by W costs 2 W FLOPs per token forward
and 4 W backward; attention costs two products of 2 N H l^2 forward and four backward, half of it where it is causal.
A collective over p ranks of an n-byte result makes each rank send n (p - 1) / p bytes (ring algorithm, Thakur et al.
2005). What one rank sends is counted, summed over its peers; what it receives is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from lengthwise.core.errors import InputError
from lengthwise.core.head_split import ulysses_degree
from lengthwise.core.pipeline_config import Method
from lengthwise.core.specs import ModelSpec
from lengthwise.cost.analytic.heads import split_heads
from lengthwise.cost.links import SENT_NOTHING, Sent
from lengthwise.cost.memory_model import DTYPE_BYTES, kept_bytes_per_layer, norm_bytes


@dataclass(frozen=True, kw_only=True)
class LayerPass:
    """The forward or the backward of one layer on the busiest of its devices."""

    matmul_flops: float
    """Per token of the pack: products with weights."""
    attention_flops: float
    """Per squared token of a sequence."""
    tokens: Sent = SENT_NOTHING
    """Bytes per token of the pack."""
    weights: Sent = SENT_NOTHING
    """Bytes per micro-batch, however many tokens it has."""


@dataclass(frozen=True, kw_only=True)
class LayerVolume:
    """One layer under one method on the busiest of its devices. Bytes are per token of the whole pack."""

    forward: LayerPass
    backward: LayerPass
    kept_bytes: float
    """Per token: what the forward leaves for the backward."""
    input_bytes: float
    """Per token: the layer's input, all that a recomputed layer leaves."""
    live_bytes: float = 0.0
    """Per token: communication buffers, alive for one layer at a time."""
    buffer_bytes: float = 0.0
    """Weights that visit or are gathered, and their gradients so far, beside one layer's tokens."""
    attention_buffer_bytes: float = 0.0
    """Gathered weights, and a gradient, in the backward of attention if the layer before begins with a forward."""
    reduce_bytes: float = 0.0
    """The same while the gradients of a gathered feed-forward are sent, when its tokens are freed."""


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Sizes that the derivations share."""

    model: ModelSpec
    degree: int
    width: int
    master: int

    @property
    def others(self) -> float:
        """Share that a rank sends to the others, (p - 1) / p."""
        return (self.degree - 1) / self.degree

    @property
    def query_size(self) -> int:
        """Size of all query heads together, N H."""
        return self.model.num_heads * self.model.head_size

    @property
    def kv_size(self) -> int:
        """Size of all keys and values together, 2 K H."""
        return 2 * self.model.num_kv_heads * self.model.head_size

    @property
    def attention_params(self) -> int:
        """Weights of an attention, D (2 N + 2 K) H."""
        return self.model.hidden_size * (2 * self.query_size + self.kv_size)

    @property
    def ffn_params(self) -> int:
        """Weights of a feed-forward, 3 D F or 2 D F."""
        return self.model.layer_matmul_params - self.attention_params

    @property
    def attention_numbers(self) -> int:
        """Numbers that move with an attention: its weights and the bias of queries, keys and values."""
        return self.attention_params + (self.model.qkv_size if self.model.qkv_bias else 0)

    @property
    def ffn_numbers(self) -> int:
        """Numbers that move with a feed-forward: its weights, those of all experts, and the bias of its columns."""
        biases = self.model.ffn_size if self.model.has_all_biases else 0
        return self.ffn_params + self.model.idle_ffn_params + biases

    @property
    def ffn_copies(self) -> int:
        """Numbers per feed-forward column and token that the backward needs: inputs and output of the activation."""
        return 3 if self.model.gated_ffn else 2

    @property
    def square_flops(self) -> float:
        """Forward FLOPs of attention per l^2, over all heads."""
        return 4.0 * self.query_size * (0.5 if self.model.causal else 1.0)

    def calls(self, count: int) -> int:
        """``count`` calls, or none on one device."""
        return count if self.degree > 1 else 0

    def ring_calls(self, count: int) -> dict[str, int]:
        """``count`` calls of :class:`Sent` that pass every rank."""
        return {"calls": self.calls(count), "ring_calls": self.calls(count)}


@lru_cache(maxsize=4096)
def layer_volume(model: ModelSpec, method: Method, *, degree: int, dtype: str) -> LayerVolume:
    """What a layer of ``model`` costs each of ``degree`` devices under ``method``.

    Raises:
        InputError: the method cannot share this model's layers among so many devices.
    """
    width = DTYPE_BYTES[dtype]
    case = _Case(model=model, degree=degree, width=width, master=max(4, width))
    return _FORMS[method](case)


def _dense(case: _Case) -> LayerVolume:
    """One device: W FLOPs, nothing sent, everything kept."""
    return _token_local(case)


def _token_local(
    case: _Case, *, forward: Sent = SENT_NOTHING, backward: Sent = SENT_NOTHING, live: float = 0.0
) -> LayerVolume:
    """Each device multiplies T / p tokens by all of W and does 1 / p of attention; it keeps T / p of everything."""
    model, p = case.model, case.degree
    weights, square = model.layer_matmul_params / p, case.square_flops / p
    return LayerVolume(
        forward=LayerPass(matmul_flops=2.0 * weights, attention_flops=square, tokens=forward),
        backward=LayerPass(matmul_flops=4.0 * weights, attention_flops=2 * square, tokens=backward),
        kept_bytes=kept_bytes_per_layer(model, case.width) / p,
        input_bytes=model.hidden_size * case.width / p,
        live_bytes=live,
    )


def _ring(case: _Case) -> LayerVolume:
    """Queries stay; keys and values (2 K H T / p) visit every rank. Liu et al. 2023, zigzag-balanced where causal.

    Forward: p - 1 hops. Backward: they visit again, followed by their gradients at master precision, which take one hop
    more to get home. Alive at once: the block here, the one that comes and this block's gradients as attention makes
    them; at master precision what is added to them, what goes on, what comes, and room for the next.
    """
    block, hops = case.kv_size / case.degree, case.degree - 1
    gradient_hops = case.calls(case.degree)
    return _token_local(
        case,
        forward=Sent(ring=hops * block * case.width, calls=hops),
        backward=Sent(ring=block * (hops * case.width + gradient_hops * case.master), calls=gradient_hops),
        live=block * _ring_widths(case),
    )


def _ring_widths(case: _Case) -> int:
    """Bytes alive for each number of a block in a ring's backward: between two ranks nothing comes after the hop."""
    if case.degree <= 2:
        return case.calls(1) * (2 * case.width + 3 * case.master)
    return 3 * case.width + 4 * case.master


def _ulysses(case: _Case) -> LayerVolume:
    """Tokens are traded for heads around attention (DeepSpeed-Ulysses, Jacobs et al. 2023).

    Forward: of its T / p tokens a rank sends every other rank the queries, keys and values of that rank's heads, and
    gets its own tokens' outputs back: (p - 1) / p of T / p (2 N + 2 K) H numbers, 2 calls. Fewer key/value heads than
    ranks are copied. Backward: the same, reversed. Attention runs on the busiest rank's heads. Kept beyond 1 / p of a
    dense layer: the output in both splits.
    """
    model, p, width = case.model, case.degree, case.width
    heads = split_heads(model.num_heads, model.num_kv_heads, degree=p)
    copies = 2 * heads.num_kv_copies * model.head_size
    sent = Sent(all_to_all=case.others / p * (2 * case.query_size + copies) * width, calls=case.calls(2))
    local = _token_local(case, forward=sent, backward=sent)
    square = case.square_flops * heads.num_heads / model.num_heads
    kept_by_busiest = 2 * (heads.num_heads + heads.num_kv_heads) * model.head_size * width + 4 * heads.num_heads
    evenly = (2 * case.query_size + case.kv_size) * width + 4 * model.num_heads
    return LayerVolume(
        forward=LayerPass(matmul_flops=local.forward.matmul_flops, attention_flops=square, tokens=sent),
        backward=LayerPass(matmul_flops=local.backward.matmul_flops, attention_flops=2 * square, tokens=sent),
        kept_bytes=local.kept_bytes + kept_by_busiest - evenly / p + case.calls(1) * case.query_size * width / p,
        input_bytes=local.input_bytes,
        live_bytes=case.calls(1) * (case.query_size + copies) * width / p,
    )


def _ulysses_ring(case: _Case) -> LayerVolume:
    """Ulysses among u neighbours, whose p / u groups form rings (USP, Fang & Zhao 2024).

    A rank sends its u - 1 neighbours what Ulysses of degree u sends of T u / p tokens, and p / u - 1 hops, p / u in the
    backward, of the keys and values that its heads read of those. Attention runs on the busiest rank's heads. Between
    two groups, gradients that came home are traded back without a block at master precision that a ring alone keeps.
    """
    model, p, width = case.model, case.degree, case.width
    u = ulysses_degree(Method.ULYSSES_RING, p, model.num_heads, model.num_kv_heads)
    within, across = replace(case, degree=u), replace(case, degree=p // u)
    if u == 1:
        return _ring(case)
    heads = split_heads(model.num_heads, model.num_kv_heads, degree=u)
    trades, share = _ulysses(within), u / p
    block, hops = 2 * heads.num_kv_heads * model.head_size * share, across.degree - 1
    gradient_hops = across.calls(across.degree)
    sent = trades.forward.tokens
    to_heads = replace(sent, all_to_all=sent.all_to_all * share)
    forward = replace(to_heads, ring=hops * block * width, calls=sent.calls + hops)
    backward = replace(
        to_heads, ring=block * (hops * width + gradient_hops * case.master), calls=sent.calls + gradient_hops
    )
    return LayerVolume(
        forward=replace(
            trades.forward, matmul_flops=trades.forward.matmul_flops * share, tokens=forward,
            attention_flops=trades.forward.attention_flops * share,
        ),
        backward=replace(
            trades.backward, matmul_flops=trades.backward.matmul_flops * share, tokens=backward,
            attention_flops=trades.backward.attention_flops * share,
        ),
        kept_bytes=trades.kept_bytes * share,
        input_bytes=trades.input_bytes * share,
        live_bytes=max(trades.live_bytes * share, block * (_ring_widths(across) - (across.degree == 2) * case.master)),
    )  # fmt: skip


def _all_gather(case: _Case) -> LayerVolume:
    """Queries stay; the keys and values of all tokens come at once (Llama 3, Grattafiori et al. 2024).

    Forward: one all-to-all of 2 K H T / p numbers to every other rank. Backward: they come again, and their gradients
    go home at master precision. Alive at once: those of all tokens, and their gradients.
    """
    block = case.kv_size / case.degree * (case.degree - 1)
    return _token_local(
        case,
        forward=Sent(all_to_all=block * case.width, calls=case.calls(1)),
        backward=Sent(all_to_all=block * (case.width + case.master), calls=case.calls(2)),
        live=case.calls(2) * case.kv_size * (case.width + case.master),
    )


def _megatron_ts(case: _Case) -> LayerVolume:
    """Weights split by head group and feed-forward column (Korthikanti et al. 2023).

    Forward: the tokens are all-gathered before attention and before the feed-forward and the partial sums
    reduce-scattered after each: 2 + 2 calls of T D numbers. Backward: the conjugates, and both inputs are gathered
    again rather than kept: 4 + 2 calls. Alive at once: gathered input, output gradient and input gradient, 3 T D.

    Raises:
        InputError: fewer key/value head groups than devices.
    """
    model, p, width = case.model, case.degree, case.width
    if p > model.num_kv_heads:
        raise InputError(
            f"megatron_ts splits the weights of {model.name} by its {model.num_kv_heads} key/value heads, too few for "
            f"degree {p}; choose a degree of at most {model.num_kv_heads} or another method"
        )
    heads = split_heads(model.num_heads, model.num_kv_heads, degree=p)
    columns = -(-model.ffn_size // p)
    share = heads.num_heads / model.num_heads
    weights = case.attention_params * share + case.ffn_params * columns / model.ffn_size
    square = case.square_flops * share
    gathered = case.others * model.hidden_size * width
    kept_bytes = (2 * (heads.num_heads + heads.num_kv_heads) * model.head_size + case.ffn_copies * columns) * width
    return LayerVolume(
        forward=LayerPass(
            matmul_flops=2.0 * weights,
            attention_flops=square,
            tokens=Sent(all_gather=2 * gathered, reduce_scatter=2 * gathered, **case.ring_calls(4)),
        ),
        backward=LayerPass(
            matmul_flops=4.0 * weights,
            attention_flops=2 * square,
            tokens=Sent(all_gather=4 * gathered, reduce_scatter=2 * gathered, **case.ring_calls(6)),
        ),
        kept_bytes=kept_bytes + 4 * heads.num_heads + (4 * model.hidden_size * width + norm_bytes(model)) / p,
        input_bytes=model.hidden_size * width / p,
        live_bytes=case.calls(3) * model.hidden_size * width,
    )


def _with_gathered_weights(form: Callable[[_Case], LayerVolume]) -> Callable[[_Case], LayerVolume]:
    """A method of whole weights on sharded ones: ZeRO-3 per layer (Rajbhandari et al. 2020).

    Per micro-batch, whatever its tokens: an all-gather of W forward and another backward, and a reduce-scatter of W's
    gradient at master precision; one call each for attention and feed-forward. Alive beside the tokens: the weights of
    one and the gradient of its last product; while gradients are sent: those, also at master precision in the order
    they are sent in. Both times the weights of the other too.
    """

    def gathered(case: _Case) -> LayerVolume:
        smaller, larger = sorted((case.attention_numbers, case.ffn_numbers))
        num_weights = smaller + larger
        once, again = case.others * num_weights * case.width, case.others * num_weights * case.master
        volume = form(case)
        return replace(
            volume,
            forward=replace(volume.forward, weights=Sent(all_gather=once, **case.ring_calls(2))),
            backward=replace(
                volume.backward, weights=Sent(all_gather=once, reduce_scatter=again, **case.ring_calls(4))
            ),
            buffer_bytes=case.calls(1) * (larger * (1 + 1 / case.ffn_copies) + smaller) * case.width,
            attention_buffer_bytes=case.calls(1) * 2.5 * case.attention_numbers * case.width,
            reduce_bytes=case.calls(1) * (larger * (case.width + case.master) + smaller * case.width),
        )

    return gathered


def _two_rings(case: _Case) -> LayerVolume:
    """Ring self-attention (Li et al. 2023): first the keys go round for the sums of the softmax, then the values.

    Theirs holds the scores in between, N T^2 / p numbers; here attention's kernel runs twice, the first time for the
    sums alone, and the keys come again with the values: 3 K H T / p numbers per hop instead of 2. The backward is the
    ring's.
    """
    volume = _ring(case)
    if case.degree == 1:
        return volume
    forward = volume.forward
    tokens = replace(forward.tokens, ring=1.5 * forward.tokens.ring, calls=2 * forward.tokens.calls)
    return replace(volume, forward=replace(forward, attention_flops=2.0 * forward.attention_flops, tokens=tokens))


def _metp(case: _Case) -> LayerVolume:
    """Memory-efficient tensor parallel (Liang et al. 2025, in ParaDySe): each rank computes its own T / p tokens
    through every weight shard in turn, and keeps next to nothing.

    Attention, for each of the G = min(p, K) shards: broadcast the shard from its owner, make queries, keys and values
    of its heads for the local tokens, ring them round (p - 1 hops), project the outputs. Feed-forward: its shards go
    round in a ring. Backward: the broadcasts and rings again; queries, keys, values and activations made again
    (D (N + 2 K) H and D F or 2 D F more); key/value gradients ride along and home as in ``ring``; gradients of
    attention shards are reduced to their owners, those of feed-forward shards ride their ring and take a hop home; all
    gradients at master precision. Kept: inputs of the norms and of the products, attention's outputs and their
    log-sum-exps.
    """
    model, p, width, master = case.model, case.degree, case.width, case.master
    shards = min(p, model.num_kv_heads)
    attention, ffn = case.others * case.attention_numbers, case.ffn_numbers
    local, ring = _token_local(case), _ring(case)
    forward, backward = ring.forward.tokens, ring.backward.tokens
    remade_ffn = case.ffn_params * (case.ffn_copies - 1) / case.ffn_copies
    remade = model.hidden_size * (case.query_size + case.kv_size) + remade_ffn
    made = (case.query_size + case.kv_size) / shards
    return LayerVolume(
        forward=replace(
            local.forward,
            tokens=replace(forward, calls=shards * forward.calls),
            weights=Sent(
                broadcast=attention * width,
                ring=case.others * ffn * width,
                calls=case.calls(shards + p - 1),
                ring_calls=case.calls(shards),
            ),
        ),
        backward=replace(
            local.backward,
            matmul_flops=local.backward.matmul_flops + 2.0 * remade / p,
            tokens=replace(backward, calls=shards * backward.calls),
            weights=Sent(
                broadcast=attention * width,
                reduce=attention * master,
                ring=case.others * ffn * width + case.calls(1) * ffn * master,
                calls=case.calls(2 * shards + p),
                ring_calls=case.calls(2 * shards),
            ),
        ),
        kept_bytes=((4 * model.hidden_size + case.query_size) * width + 4 * model.num_heads + norm_bytes(model)) / p,
        input_bytes=local.input_bytes,
        live_bytes=(made * width) / p + ring.live_bytes / shards,
        buffer_bytes=3 * max(case.attention_numbers / shards, ffn / p) * (width + master) * case.calls(1),
    )


_FORMS: dict[Method, Callable[[_Case], LayerVolume]] = {
    Method.DENSE: _dense,
    Method.MEGATRON_TS: _megatron_ts,
    Method.MEGATRON_CZ: _with_gathered_weights(_ring),
    Method.ULYSSES_Z: _with_gathered_weights(_ulysses),
    Method.COLOSSAL_Z: _with_gathered_weights(_two_rings),
    Method.METP: _metp,
    Method.ULYSSES: _ulysses,
    Method.RING: _ring,
    Method.ULYSSES_RING: _ulysses_ring,
    Method.ALL_GATHER: _all_gather,
}
