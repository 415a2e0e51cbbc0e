"""The search space that compares the best arms of a sweep with the baseline, with fresh seeds."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.common.files import write_atomically
from fedsweep.common.progress import loading
from fedsweep.common.yaml_values import Json
from fedsweep.results import SweepStore
from fedsweep.results.arms import NAMED
from fedsweep.results.history import on_test
from fedsweep.sweep.space.designs import changes

BASELINE = "baseline"
FOLDER = Path("search_spaces", "confirm")


def write_confirmation(sweep: SweepStore, top: int, seeds: int, console: Console) -> tuple[str, Path]:
    """Write the search space that confirms the best arms of a sweep.

    The arms are trained as in the sweep, and measured on the test images. They are named arms, so the search space can
    be read, changed and run again like any other.

    Args:
        sweep: The sweep.
        top: The number of best arms.
        seeds: The number of seeds. They follow the largest seed of the sweep.
        console: The console for progress messages.

    Returns:
        The name of the search space, and the path of its file.

    Raises:
        UserError: Fewer than `top` arms have finished, or the search space of the sweep is no longer valid.
    """
    manifest = sweep.manifest()
    with loading(console, "PyTorch", "fedsweep.sweep.plan.plan"):
        from fedsweep.report.arm_statistics import summarise
        from fedsweep.report.choice import ranked_arms
        from fedsweep.sweep.plan.plan import Plan

    plan = Plan.read(manifest.name, manifest.overrides, manifest.options)
    arms = summarise(manifest, sweep.trials())
    ranked = [one for one in ranked_arms(manifest, arms) if not one.is_baseline]
    if len(ranked) < top:
        finished = f"only {len(ranked)} of its arms have finished" if ranked else "none of its arms has finished"
        raise UserError(f"`--top` is {top}, but sweep {manifest.id} of {manifest.name} has fewer arms: {finished}.")
    baselines = [one.arm.values for one in arms if one.is_baseline] or [{}]
    named = {BASELINE: changes(baselines[0], plan.left_out, plan.space.named)}
    for place, one in enumerate(ranked[:top], 1):
        named[f"best_{place}" if top > 1 else "best"] = changes(one.arm.values, plan.left_out, plan.space.named)
    fixed = {**plan.space.fixed, "evaluation.test_rounds": "all"}
    first = max(manifest.seeds) + 1
    name = f"confirm/{manifest.name}/{manifest.id}"
    text = "\n".join(
        [
            f"# Are the best arms of {manifest.name} better than the baseline with fresh seeds, on the test images?",
            "#",
            f"#   fedsweep tune {name}",
            "",
            f"experiment: {plan.space.experiment}",
            "",
            "fixed:",
            *_lines(fixed),
            "",
            "named:",
            *(f"  {arm}: {_flow(values)}" for arm, values in named.items()),
            "",
            f"seeds: {list(range(first, first + seeds))}",
            "",
            f"baseline: {{{NAMED}: {BASELINE}}}",
            "",
            f"objective: {{metric: {on_test(manifest.metric)}, mode: {manifest.mode}}}",
            "",
            "search: {name: grid}",
            "",
            "scheduler: {name: none}",
            "",
            f"resources: {_flow(plan.space.resources.model_dump(mode='json'))}",
            "",
        ]
    )
    path = FOLDER / manifest.name / f"{manifest.id}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())
    return name, path


def _lines(values: Mapping[str, Json]) -> Sequence[str]:
    return [f"  {name}: {json.dumps(value)}" for name, value in values.items()]


def _flow(values: Mapping[str, Json]) -> str:
    """Return a mapping as YAML on one line."""
    return f"{{{', '.join(f'{name}: {json.dumps(value)}' for name, value in values.items())}}}"
