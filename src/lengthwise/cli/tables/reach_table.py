"""What `lengthwise compare --reach` prints: every policy's speed over the length of sequences."""

from collections.abc import Sequence

from lengthwise.cli.tables.compare_table import table_of
from lengthwise.core.errors import InfeasibleError
from lengthwise.session.compare_policies import PolicyComparison
from lengthwise.session.console import emit_json, progress, stdout
from lengthwise.session.reach import Reach, policy_reach
from lengthwise.session.sweep import SweepPoint


def show_reach(contest: PolicyComparison, points: Sequence[SweepPoint], *, max_length: int | None, json: bool) -> None:
    """Plan steps of ever longer sequences, and print a table a cluster or one document.

    Args:
        contest: what is compared.
        points: clusters, and tokens of a step.
        max_length: the longest sequence asked for; None: as long as the model has positions and any policy can train.
        json: whether it is a document.

    Raises:
        InfeasibleError: no policy can train any length on any of the clusters.
    """
    limits = [limit for limit in (max_length, contest.model.max_positions) if limit]
    with progress() as bar:
        task = bar.add_task("plan", total=None)
        reaches = [
            policy_reach(
                contest,
                point.cluster,
                tokens_per_step=point.tokens_per_step,
                most_tokens=min(limits, default=0),
                on_length=lambda length: bar.update(task, advance=1, description=f"sequences of {length:,} tokens"),
            )
            for point in points
        ]
    if not any(policy.reached for reach in reaches for policy in reach.policies):
        raise InfeasibleError(reaches[0].policies[0].refused)
    if json:
        model = {"model": contest.model.name, "dtype": contest.dtype}
        return emit_json({**model, "clusters": [reach.to_json() for reach in reaches]})
    for reach in reaches:
        _print_reach(contest, reach)
    stdout().print("simulated, not measured; in each step all sequences are as long", soft_wrap=True)


def _print_reach(contest: PolicyComparison, reach: Reach) -> None:
    """A row a policy, tokens/s in a column a length, and why the longest reach ends."""
    from lengthwise.report.units import compact, tokens

    console, shown = stdout(), reach.lengths
    console.print(
        f"{contest.model.name} on {reach.cluster.name}, {reach.cluster.device.memory_in_words} a device: "
        "tokens/s over the length of sequences, and the longest that each policy trains",
        soft_wrap=True,
    )
    rows = []
    for policy in reach.policies:
        speeds = [compact(point.tokens_per_s) if (point := policy.at(length)) else "" for length in shown]
        rows.append((policy.policy, *speeds, f"{policy.longest_tokens:,}" if policy.reached else "none"))
    console.print(table_of(("policy", *map(tokens, shown), "longest"), rows))
    for why in dict.fromkeys(policy.refused for policy in reach.policies if policy.refused):
        console.print(why, soft_wrap=True)
