"""The search space that compares the best arms of a sweep with the baseline, with fresh seeds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from fedsweep.common.errors import UserError
from fedsweep.common.files import write_atomically
from fedsweep.common.paths import project_folder
from fedsweep.common.progress import loading
from fedsweep.common.yaml_values import Json
from fedsweep.results import SweepManifest, SweepStore
from fedsweep.results.arms import NAMED
from fedsweep.results.history import VALIDATION, is_of_clients, on_test
from fedsweep.results.tuned_arms import space_name
from fedsweep.sweep.space.search_space import SearchSpace

BASELINE = "baseline"


class Confirmation(NamedTuple):
    """A search space that confirms the best arms of a sweep."""

    name: str
    path: Path
    is_new: bool
    """False if an earlier command wrote the file."""

    def remove(self) -> None:
        """Remove the file again if it is new, and the folders that are then empty."""
        if not self.is_new:
            return
        self.path.unlink(missing_ok=True)
        for folder in self.path.parents:
            if folder == project_folder() or any(folder.iterdir()):
                break
            folder.rmdir()


def write_confirmation(sweep: SweepStore, top: int, seeds: int, console: Console) -> Confirmation:
    """Write the search space that confirms the best arms of a sweep.

    The arms are trained as in the sweep, and measured on the test images. If the sweep has several baselines, the best
    arm's baseline is used. The arms are named arms, so the search space can be read, changed and run again like any
    other.

    Args:
        sweep: The sweep.
        top: The number of best arms.
        seeds: The number of seeds. They follow the largest seed of the sweep.
        console: The console for progress messages.

    Raises:
        UserError: The sweep has no arms that can be repeated, fewer than `top` arms have finished, the YAML files of
            the sweep have changed, or the file exists with other content.
    """
    manifest = sweep.manifest()
    _check_repeatable(manifest)
    with loading(console, "PyTorch", "fedsweep.sweep.plan.plan"):
        from fedsweep.report.arm_statistics import summarise
        from fedsweep.report.choice import ranked_arms
        from fedsweep.sweep.plan.plan import Plan

    plan = Plan.read(manifest.name, manifest.overrides, manifest.options)
    arms = summarise(manifest, sweep.trials())
    ranked = [one for one in ranked_arms(manifest, arms) if not one.is_baseline]
    if plan.digests()["definition"] != manifest.digests["definition"]:
        raise UserError(
            f"sweep {manifest.id} of {manifest.name} cannot be confirmed because its YAML files have changed since the "
            "sweep was started; undo the change."
        )
    if len(ranked) < top:
        kind = "finished" if manifest.against is None else "efficient"
        finished = f"{len(ranked)} {'is' if len(ranked) == 1 else 'are'} {kind}"
        raise UserError(f"`--top` is {top}, but of the arms of sweep {manifest.id} of {manifest.name}, {finished}.")
    baseline = next((one.arm.values for one in arms if one.key == ranked[0].counterpart), {})
    best = {f"best_{place}" if top > 1 else "best": one.arm.values for place, one in enumerate(ranked[:top], 1)}
    named = {name: plan.changes(values) for name, values in {BASELINE: baseline, **best}.items()}
    name = f"confirm/{manifest.name}/{manifest.id}-top{top}-seeds{seeds}"
    text = _yaml(name, manifest, plan.space, named, seeds)
    file = Path("search_spaces", f"{name}.yaml")
    path = project_folder() / file
    if (exists := path.exists()) and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{file} exists with other arms; run it with `fedsweep tune {name}`, or delete the file first.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())
    if warned := images_that_chose(manifest):
        console.print(warned, style="yellow", soft_wrap=True)
    return Confirmation(name, path, not exists)


def _check_repeatable(manifest: SweepManifest) -> None:
    """Raise an error if no arm of the sweep can be repeated with other seeds."""
    which = f"sweep {manifest.id} of {manifest.name} cannot be confirmed"
    if manifest.scheduler == "pbt":
        raise UserError(
            f"{which}: its scheduler pbt changes hyperparameters during the training, and an arm has fixed values."
        )
    if manifest.stage is not None and manifest.stage.name == "tuning":
        space = space_name(manifest.name, manifest.stage)
        raise UserError(
            f"{which}: it chooses one sample for each arm, and the sweep {space}/tuned compares the arms with these "
            "samples and other seeds."
        )


def images_that_chose(manifest: SweepManifest) -> str | None:
    """Return a warning if the sweep chose by images on which its best arms are confirmed."""
    if manifest.choice_by_test_images is None:
        own_models = is_of_clients(manifest.metric) and manifest.metric.startswith(VALIDATION)
        return (
            "The clients' test images depend on the seed, so some of them are tuning images of the search, by which "
            f"{manifest.name} chose its best arms."
            if own_models
            else None
        )
    return (
        f"The best arms of {manifest.name} were chosen by the test images, on which they are now compared again. New "
        "seeds remove the luck of the seed, but not that of the images."
    )


def _yaml(
    name: str, manifest: SweepManifest, space: SearchSpace, named: Mapping[str, Mapping[str, Json]], seeds: int
) -> str:
    """Return the search space that compares named arms over `seeds` seeds that the sweep has not used."""
    first = max(manifest.seeds) + 1
    fixed = {**space.fixed, "evaluation.test_rounds": "all"}
    lines = [
        f"# Are the best arms of {manifest.name} better than the baseline with fresh seeds, on the test images?",
        *([f"# {warned}"] if (warned := images_that_chose(manifest)) else []),
        "#",
        f"#   fedsweep tune {name}",
        "",
        f"experiment: {space.experiment}",
        "",
        "fixed:",
        *(f"  {setting}: {json.dumps(value)}" for setting, value in fixed.items()),
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
        f"resources: {_flow(space.resources.model_dump(mode='json'))}",
        "",
    ]
    return "\n".join(lines)


def _flow(values: Mapping[str, Json]) -> str:
    """Return a mapping as YAML on one line."""
    return f"{{{', '.join(f'{name}: {json.dumps(value)}' for name, value in values.items())}}}"
