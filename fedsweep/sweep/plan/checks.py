"""The checks of a search space and its arms before anything runs.

This module does not import ray.
"""

from collections.abc import Iterator, Mapping, Sequence

from fedsweep.federation.run_config import RunConfig
from fedsweep.results.arms import Arm, arm_label, identity
from fedsweep.sweep.plan.comparison_checks import wrong_family
from fedsweep.sweep.plan.metric_checks import wrong_metrics
from fedsweep.sweep.plan.model_counts import COUNTS
from fedsweep.sweep.plan.resolved_space import ResolvedSpace, describe
from fedsweep.sweep.plan.space_checks import find_mistakes
from fedsweep.sweep.space.mistakes import Mistake

Configs = Sequence[tuple[Arm, RunConfig]]


def check(resolved: ResolvedSpace, rejected: Mapping[str, Sequence[Mistake]] | None = None) -> None:
    """Raise UserError with all mistakes in a search space and its arms, except those that may follow from others.

    Args:
        resolved: The search space.
        rejected: The mistakes in `fixed` values that `resolved` does not contain, by dotted name.
    """
    found = find_mistakes(resolved, rejected)
    counted = resolved.request.counted

    def metrics(config: RunConfig) -> Sequence[str]:
        return COUNTS if counted else config.metrics()

    of_metrics = map(Mistake, wrong_metrics(resolved, found, metrics))
    if mistakes := [*found.mistakes, *_wrong_runs(resolved, found.configs), *of_metrics]:
        raise resolved.request.origin.error(mistakes)


def _wrong_runs(resolved: ResolvedSpace, configs: Configs) -> Iterator[Mistake]:
    """Yield a mistake for the first two arms of a grid that have the same configuration.

    If `synthetic` varies, also yield an error message about the first arm that does not train on synthetic images. In a
    sampled search, also yield an error message about the invalid points in `search.first`.
    """
    if resolved.space.search.name != "grid":
        points = resolved.space.search.first
        if invalid := resolved.resolve_valid(points)[1]:
            yield describe(invalid, points)
    varies_synthetic = any(name.split(".")[0] == "synthetic" for name in resolved.space.names)
    if others := [arm for arm, config in configs if varies_synthetic and not config.trains_on_synthetic]:
        rule = f"`synthetic` varies, but the arm {arm_label(others[0])} does not train on synthetic images."
        yield Mistake(rule, arm=others[0])
    if resolved.space.until_decided is not None:
        yield from map(Mistake, wrong_family(resolved.space, [arm for arm, _ in configs]))
    seen: dict[str, Arm] = {}
    for arm, config in configs if resolved.sampled is None else ():
        first = seen.setdefault(identity(config.model_dump(mode="json")), arm)
        if first is not arm:
            yield Mistake(f"the arms {arm_label(first)} and {arm_label(arm)} are the same run.", arm=arm)
            return
