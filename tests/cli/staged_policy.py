"""A policy of another package that plans pipelines of several stages alone."""

from dataclasses import replace

from lengthwise.plan.policies import prepare


def in_stages(problem):
    """The static policy among the candidates with stages."""
    staged = tuple(candidate for candidate in problem.candidates if candidate.num_stages > 1)
    return prepare("static", replace(problem, candidates=staged))
