"""Make the small pictures of docs/concepts.

python tools/concept_pictures.py
"""

from drawing import IMAGES, box, document, words

from lengthwise.core.one_f_one_b import PassTimes, run_stages
from lengthwise.core.pass_order import PassKind
from lengthwise.core.sliced_passes import sliced_orders
from lengthwise.core.zero_bubble import filled_orders, stage_times

WIDTH = 640
LEFT = 96
LOOKS = dict(zip(PassKind, ("compute", "update", "communicate")))


def row(name: str, y: float) -> str:
    """The name of a row, to the left of its boxes."""
    return words(name, LEFT - 12, y + 15, anchor="end")


def packing() -> str:
    """Padding computes what is not there; packs do not; both have the same four sequences."""
    lengths, names, unit = (9, 4, 3, 2), "abcd", 26
    parts = [row("padded", 12)]
    for k, (length, name) in enumerate(zip(lengths, names)):
        y = 12 + 24 * k
        parts.append(box(LEFT, y, length * unit, 20, "compute", name))
        if length < lengths[0]:
            parts.append(box(LEFT + length * unit, y, (lengths[0] - length) * unit, 20, "wait", "padding"))
    parts += [row("packed", 124), box(LEFT, 124, 9 * unit, 20, "compute", "a")]
    across = LEFT
    for length, name in zip(lengths[1:], names[1:]):
        parts.append(box(across, 150, length * unit - 1, 20, "compute", name))
        across += length * unit
    return document(parts, width=WIDTH, height=184, label="Four sequences padded to the longest, and packed")


def accumulation() -> str:
    """Ranks with different numbers of micro-batches and equal work."""
    parts = []
    for rank, times in enumerate([(210, 105), (80, 79, 78, 77), (314,)]):
        y, across = 12 + 28 * rank, LEFT
        parts.append(row(f"rank {rank}", y))
        for k, time in enumerate(times):
            parts.append(box(across, y, time - 2, 22, "compute", f"micro-batch {k + 1}" if time > 100 else f"{k + 1}"))
            across += time
        parts.append(box(LEFT + 316, y, 150, 22, "update", "sum, clip, update"))
    label = "Three ranks accumulate two, four and one micro-batches, and update together"
    return document(parts, width=WIDTH, height=104, label=label)


def sequence_parallel() -> str:
    """Zigzag shards of one sequence on two ranks."""
    parts, unit = [row("sequence", 12)], 116
    for k, (name, owner) in enumerate(zip("abcd", (0, 1, 1, 0))):
        parts.append(box(LEFT + k * unit, 12, unit - 2, 22, ("compute", "update")[owner], f"chunk {name}"))
    parts += [row("rank 0", 56), box(LEFT, 56, 114, 22, "compute", "a"), box(LEFT + 116, 56, 114, 22, "compute", "d")]
    parts += [row("rank 1", 84), box(LEFT, 84, 114, 22, "update", "b"), box(LEFT + 116, 84, 114, 22, "update", "c")]
    parts += [box(LEFT + 240, 56, 222, 50, "communicate", "meet in attention")]
    return document(parts, width=WIDTH, height=118, label="A sequence in four chunks, two on each of two ranks")


def tensor_parallel() -> str:
    """All tokens on every rank while it computes, its rows of the weights alone."""
    parts = []
    for rank, kind in enumerate(("compute", "update")):
        y = 12 + 34 * rank
        parts += [
            row(f"rank {rank}", y + 3),
            box(LEFT, y, 110, 28, "communicate", "all-gather"),
            box(LEFT + 112, y, 220, 28, kind, f"all tokens, weights {rank + 1} of 2"),
            box(LEFT + 334, y, 130, 28, "communicate", "reduce-scatter"),
        ]
    return document(parts, width=WIDTH, height=88, label="Two ranks compute all tokens with half of the weights each")


def pipeline_parallel() -> str:
    """1F1B of four equal micro-batches on two stages, a backward twice a forward."""
    unit, parts = 28, []
    first = [("F1", 0, 1), ("F2", 1, 1), ("B1", 4, 2), ("F3", 6, 1), ("B2", 7, 2), ("F4", 9, 1), ("B3", 10, 2)]
    second = [("F1", 1, 1), ("B1", 2, 2), ("F2", 4, 1), ("B2", 5, 2), ("F3", 7, 1), ("B3", 8, 2), ("F4", 10, 1)]
    for stage, passes in enumerate(([*first, ("B4", 13, 2)], [*second, ("B4", 11, 2)])):
        y = 12 + 28 * stage
        parts += [row(f"stage {stage + 1}", y), box(LEFT, y, 15 * unit, 22, "wait")]
        for name, start, length in passes:
            kind = "compute" if name[0] == "F" else "update"
            parts.append(box(LEFT + start * unit, y, length * unit - 1, 22, kind, name))
    parts += [
        words("F: forward, B: backward; grey: the bubble, a stage that waits for the other", LEFT, 86, class_="tick")
    ]
    return document(parts, width=WIDTH, height=100, label="Four micro-batches on two pipeline stages under 1F1B")


def zero_bubble() -> str:
    """Five equal micro-batches on three stages that split backwards, as the planner orders their passes."""
    unit, stages, parts = 28, 3, []
    times = PassTimes([1.0] * 5, [2.0] * 5, [1.0] * 5)
    of_stages = [stage_times(times, stage) for stage in range(stages)]
    for stage, passes in enumerate(run_stages(of_stages, orders=filled_orders(times, stages))):
        y = 12 + 28 * stage
        parts += [row(f"stage {stage + 1}", y), box(LEFT, y, 17 * unit, 22, "wait")]
        for start_s, end_s, number, kind in passes:
            name, look = {"forward": "F", "backward": "B", "weights": "W"}[kind.word], LOOKS[kind]
            parts.append(box(LEFT + start_s * unit, y, (end_s - start_s) * unit - 1, 22, look, f"{name}{number + 1}"))
    parts.append(
        words("B: gradients of inputs, on the first stage of weights too; W: of weights", LEFT, 114, class_="tick")
    )
    return document(parts, width=WIDTH, height=128, label="Five micro-batches on three stages that split backwards")


def ramp() -> str:
    """The same work on four stages in equal micro-batches and in a ramp."""
    parts, unit, y, stages = [], 12.5, 12, 4
    equal, growing = [3.0] * 8, [0.9, 1.5, 2.5, 4.1, 4.1, 4.0, 3.7, 3.2]
    for title, times_s in (("equal micro-batches", equal), ("in a ramp", growing)):
        times = PassTimes([time_s / 3 for time_s in times_s], [2 * time_s / 3 for time_s in times_s])
        parts.append(words(title, 12, y + 15, class_="name"))
        of_stages = run_stages([times] * stages)
        end_s = max(passes[-1].end_s for passes in of_stages)
        for stage, passes in enumerate(of_stages):
            parts += [row(f"stage {stage + 1}", y + 22), box(LEFT, y + 22, end_s * unit, 22, "wait")]
            for start_s, end_of_pass_s, number, kind in passes:
                width = (end_of_pass_s - start_s) * unit
                name = f"{number + 1}" if width > 14 else ""
                parts.append(box(LEFT + start_s * unit, y + 22, width - 0.7, 22, ("compute", "update")[kind], name))
            y += 26
        y += 34
    parts.append(words("blue: forwards, green: backwards; grey: waits", LEFT, y, class_="tick"))
    return document(parts, width=WIDTH, height=int(y) + 14, label="Equal micro-batches and a ramp on four stages")


def slices() -> str:
    """A long sequence and six short ones on three stages: whole, and with the long one in six slices."""
    parts, unit, y = [], 8.5, 12
    short, short_bytes = 6, 2
    for title, counts, kept_bytes in (("whole", 1, [12]), ("in slices", 6, [4, 2, 2, 2, 1, 1])):
        forwards_s = [6.0 / counts] * counts + [0.5] * short
        times = PassTimes(forwards_s, [2 * forward_s for forward_s in forwards_s])
        kept_bytes, most_bytes = [*kept_bytes, *[short_bytes] * short], 12 + 2 * max(kept_bytes)
        found = sliced_orders([counts, *[1] * short], times, kept_bytes, limit_bytes=most_bytes, num_stages=3)
        parts.append(words(title, 12, y + 15, class_="name"))
        for stage, passes in enumerate(run_stages([times] * 3, orders=found.orders)):
            parts += [row(f"stage {stage + 1}", y + 22), box(LEFT, y + 22, found.end_s * unit, 22, "wait")]
            for start_s, end_s, number, kind in passes:
                name = f"{'FB'[kind]}" if number < counts and (end_s - start_s) * unit > 14 else ""
                look = ("compute", "update")[kind] if number < counts else "communicate"
                parts.append(box(LEFT + start_s * unit, y + 22, (end_s - start_s) * unit - 0.7, 22, look, name))
            y += 26
        y += 34
    parts.append(
        words("blue, green: F and B of a long sequence; orange: six short ones; grey: waits", LEFT, y, class_="tick")
    )
    return document(
        parts, width=WIDTH, height=int(y) + 14, label="A long sequence on three stages, whole and in slices"
    )


def checkpointing() -> str:
    """What two layers of four keep for the backward."""
    parts = []
    for k, (name, kept) in enumerate((("recompute 0", (1, 1, 1, 1)), ("recompute 2", (0, 0, 1, 1)))):
        y, across = 12 + 28 * k, LEFT
        parts.append(row(name, y))
        for layer, whole in enumerate(kept):
            width = 110 if whole else 22
            parts.append(
                box(across, y, width - 2, 22, "compute" if whole else "communicate", f"layer {layer}" if whole else "")
            )
            across += width
    parts.append(
        words(
            "blue: activations that are kept; orange: the layer's input alone, computed again in the backward",
            LEFT,
            86,
            class_="tick",
        )
    )
    return document(
        parts, width=WIDTH + 60, height=100, label="Activations kept with no layer and with two layers recomputed"
    )


def pull_and_push() -> str:
    """The step of a rank: pull, compute, push, update."""
    parts, y = [row("weights", 12), row("compute", 40), row("gradients", 68)], 12
    for k in range(3):
        parts.append(box(LEFT + 62 * k, y, 60, 22, "communicate", f"pull {k}"))
        parts.append(box(LEFT + 62 + 62 * k, y + 28, 60, 22, "compute", f"F{k}"))
        parts.append(box(LEFT + 248 + 62 * k, y + 28, 60, 22, "compute", f"B{2 - k}"))
        parts.append(box(LEFT + 310 + 62 * k, y + 56, 60, 22, "communicate", f"push {2 - k}"))
    parts.append(box(LEFT + 496, y + 28, 36, 78 - 28, "update", ""))
    parts.append(words("update", LEFT + 514, y + 24, anchor="middle"))
    return document(parts, width=WIDTH, height=102, label="Weights are pulled layer by layer, gradients are pushed")


def strategy() -> str:
    """A heterogeneous strategy: one long sequence on four ranks, short ones beside it."""
    parts = [row("ranks 0-3", 34), box(LEFT, 12, 380, 66, "compute", "<4,1>: one long sequence, shared")]
    for k, sizes in enumerate([(96, 90, 100, 90), (190, 100, 84)]):
        y, across = 84 + 26 * k, LEFT
        parts.append(row(f"rank {4 + k}", y))
        for size in sizes:
            parts.append(box(across, y, size - 2, 22, "update", "<1,1>" if across == LEFT else ""))
            across += size
        parts.append(box(across, y, LEFT + 380 - across, 22, "wait"))
    return document(parts, width=WIDTH, height=148, label="A group of four ranks beside two single ranks in one step")


PARALLEL = (sequence_parallel, tensor_parallel, pipeline_parallel, ramp, zero_bubble, slices, strategy, pull_and_push)
DRAWN = (packing, accumulation, checkpointing, *PARALLEL)
PICTURES = {draw.__name__.replace("_", "-"): draw for draw in DRAWN}


def main() -> None:
    """Write every picture."""
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
