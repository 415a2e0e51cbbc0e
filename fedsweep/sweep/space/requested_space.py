"""The search space that a user requests: a YAML file with the user's changes, and all mistakes in it.

The rest of a search space with mistakes is kept, so that its hyperparameters can be checked too and all mistakes are
reported at once.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsweep.common.errors import InvalidValuesError, UserError
from fedsweep.common.paths import available, find
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.results.arms import shown_mapping, shown_setting
from fedsweep.results.seeds import SEED_STREAMS, Seeds, UntilDecided, varied_streams
from fedsweep.results.tuned_arms import STAGE, Stage, space_name, stage_of, sweep_name
from fedsweep.sweep.space.axes import below, names_of, without_kind
from fedsweep.sweep.space.mistakes import Mistake, Origin
from fedsweep.sweep.space.search_space import SearchSpace
from fedsweep.sweep.space.settings import GridSearch, NoScheduler, RandomSearch, Rounds
from fedsweep.sweep.space.tuned_axes import staged

GROUPS = ("objective", "search", "scheduler", "resources", "measure")
"""The entries of which a single wrong value is replaced by its default value."""
ARMS = ("space", "named", "ablate")
"""The entries that define the arms. The entries `NEED_ARMS` cannot be checked without them."""
NEED_ARMS = ("exclude", "baseline", "comparisons", "reference", "columns")
REPLACED: dict[str, Any] = {
    "seeds": (0,),
    "subsets": "one",
    "design": "full",
    "scheduler": NoScheduler(),
    "exclude": (),
    "baseline": None,
    "comparisons": (),
    "reference": None,
    "measure": Rounds(),
    "tune_each": None,
}
"""The entries that can be replaced if they violate a rule that involves several entries."""


@dataclass(frozen=True)
class RequestedSpace:
    """A search space with the user's changes. The YAML file of its experiment has not been read yet."""

    name: str
    space: SearchSpace
    files: Mapping[str, Path]
    """The YAML files, by the name of their copy in the sweep's folder."""
    overrides: Mapping[str, Json]
    """The user's changes to the experiment, by dotted name."""
    options: Mapping[str, Json]
    """The user's changes to the search space, by dotted name."""
    mistakes: tuple[Mistake, ...] = ()
    """The mistakes in the entries of the search space. `space` contains only the other entries."""
    wrong: frozenset[str] = frozenset()
    """The dotted names of hyperparameters whose entries in `space` stand for entries with a mistake."""

    @cached_property
    def stage(self) -> Stage | None:
        """The part of the sweep in an ablation with `tune_each`; None for other sweeps."""
        return stage_of(self.options)

    def most_trials(self) -> int:
        """Return an upper bound on the number of trials (see `SearchSpace.most_trials`)."""
        tuning = stage if (stage := self.stage) is not None and stage.name == "tuning" else None
        return self.space.most_trials() * (tuning.samples if tuning is not None else 1)

    @property
    def where(self) -> str:
        """The beginning of error messages about the search space, e.g. `search space ablations/lora_rank`."""
        return f"search space {self.name}"

    @property
    def origin(self) -> Origin:
        """The YAML file and the user's changes, with which error messages say where a mistake is."""
        return Origin.of(self.where, self.files["search_space.yaml"], self.overrides, self.options)

    @property
    def counted(self) -> bool:
        """True if no arm is trained and only the parameters of the arms are counted."""
        return self.space.measure.name == "parameters"


def read(name: str, overrides: Mapping[str, Json], options: Mapping[str, Json]) -> RequestedSpace:
    """Read a search space and apply the user's changes.

    Mistakes are not raised but returned as `RequestedSpace.mistakes`, so that they can be reported with the mistakes in
    hyperparameters. `Plan.of` raises them.

    Args:
        name: The name of the search space.
        overrides: The user's changes to the experiment, by dotted name.
        options: The user's changes to the settings of the search space, by dotted name.

    Raises:
        UserError: The file cannot be read, or there is no such experiment. The message also lists the other mistakes.
    """
    stage = stage_of(options)
    name = space_name(name, stage)
    path = find("search_spaces", name)
    draft = _Draft(Origin.of(f"search space {name}", path, overrides, options))
    space = draft.of_file(read_yaml(path))
    where = draft.origin.where
    unfit = {} if draft.dropped & {"search", *ARMS} else dict(_unfit_changes(space, overrides, options, where))
    draft.mistakes += [Mistake(sentence, on_command_line=True) for sentence in unfit.values()]
    draft.mistakes += [Mistake(sentence, "tune_each") for sentence in _taken_names(name, space)]
    kept = {key: value for key, value in overrides.items() if key not in unfit}
    wrong_search = "search" in draft.dropped  # no change of its entries can be checked
    asked = {
        key: value
        for key, value in options.items()
        if key not in unfit and key != STAGE and not (wrong_search and "search." in key)
    }
    if "seeds" in asked:
        asked["seeds"] = _changed_seeds(space.seeds, asked["seeds"])
    space = draft.changed(space, {**asked, "fixed": {**space.fixed, **kept}})
    if (streams := varied_streams(space.seeds)) is not None:
        space = space.model_copy(update={"fixed": {**space.fixed, SEED_STREAMS: [*streams]}})
    try:
        experiment = find("experiments", space.experiment)
    except UserError as error:
        if "experiment" not in draft.dropped:
            draft.mistakes.append(Mistake(str(error), "experiment", on_command_line="experiment" in options))
        raise draft.origin.error(draft.mistakes) from None
    files = {"search_space.yaml": path, "experiment.yaml": experiment}
    mistakes, wrong = tuple(draft.mistakes), frozenset(draft.hyperparameters)
    asked_space = staged(space, stage)
    return RequestedSpace(sweep_name(name, stage), asked_space, files, dict(overrides), dict(options), mistakes, wrong)


def _changed_seeds(seeds: Seeds, asked: Json) -> Json:
    """Return the setting `seeds` after the user's change, which replaces only a part of it."""
    if isinstance(seeds, UntilDecided) and isinstance(asked, dict):
        return {**seeds.model_dump(), **asked}
    if (streams := varied_streams(seeds)) is None:
        return asked
    return {**(asked if isinstance(asked, dict) else {"list": asked}), "vary": [*streams]}


def _unfit_changes(
    space: SearchSpace, overrides: Mapping[str, Json], options: Mapping[str, Json], where: str
) -> Iterator[tuple[str, str]]:
    """Yield the name of each change that a search space does not allow, with an error message."""
    for changed in overrides:
        if changed in space.names or any(changed.startswith(f"{varied}.") for varied in space.names):
            yield changed, f"`{changed}` is varied by {where} and cannot be overridden."
        elif space.tune_each is not None and below(changed, space.tune_each.space):
            yield changed, f"`{changed}` is tuned by {where} and cannot be overridden."
        elif changed == SEED_STREAMS and varied_streams(space.seeds) is not None:
            yield changed, f"`{changed}` is set by `seeds.vary` of {where} and cannot be overridden."
        elif changed == "seed":
            yield changed, f"`seed` cannot be overridden in {where}; use --seeds instead."
    if "search.samples" in options and space.search.name == "grid":
        yield "search.samples", f"--samples needs `search` tpe or random, but {where} has `search` grid."
    if "search.warm_start" in options and (search := space.search.name) != "tpe":
        rule = "--warm-start needs `search` tpe, which learns from results"
        yield "search.warm_start", f"{rule}, but {where} has `search` {search}."


def _taken_names(name: str, space: SearchSpace) -> Iterator[str]:
    """Yield an error message for each search space with the name of a sweep that `tune_each` runs."""
    if space.tune_each is None:
        return
    known = available("search_spaces")
    for stage in ("tuning", "tuned"):
        if (taken := f"{name}/{stage}") in known:
            other = "but a search space has this name; rename the search space"
            yield f"`tune_each` runs a sweep `{taken}`, {other}."


class _Draft:
    """A search space that is being read, and the mistakes that have been found in it."""

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.mistakes: list[Mistake] = []
        self.dropped: set[str] = set()
        """The dotted names of the entries that were replaced by default values."""
        self.hyperparameters: set[str] = set()
        """The dotted names of the hyperparameters whose axes or fixed values have a mistake."""
        self.unlawful = False
        """True if the search space violated a rule that involves several entries. Others may follow from it."""

    def of_file(self, content: Mapping[str, Json]) -> SearchSpace:
        """Return the search space without the entries that have a mistake."""
        data: dict[str, Any] = dict(content)
        if axes := without_kind(content):
            lines = [
                f"`{key}: {shown_mapping(axis)}` instead of `{key}: {shown_setting(data['space'][key])}`"
                for key, axis in axes.items()
            ]
            rule = "each axis of `space` must name its kind"
            self.mistakes.append(Mistake(f"{rule}; write {', and '.join(lines)}.", f"space.{next(iter(axes))}"))
            data["space"] = {**data["space"], **axes}
        for attempt in range(3):
            violations: list[str] = []
            try:
                space = SearchSpace.of(data, self.origin.where, violations, self.origin.path)
            except InvalidValuesError as error:
                # Later errors follow from the entries that were dropped.
                self.mistakes += [Mistake(one, name) for name, one in error.mistakes.items() if attempt == 0]
                data = self._without(data, error.mistakes, whole=attempt > 0)
            else:
                return self._lawful(space, violations)
        raise self.origin.error(self.mistakes)

    def changed(self, space: SearchSpace, changes: dict[str, Any]) -> SearchSpace:
        """Return the search space with the changes that have no mistake."""
        violations: list[str] = []
        try:
            return self._lawful(space.override(changes, self.origin.where, violations), violations)
        except InvalidValuesError as error:
            self.mistakes += [Mistake(one, name) for name, one in error.mistakes.items()]
            fixed = {
                name: value for name, value in changes["fixed"].items() if not _names(f"fixed.{name}", error.mistakes)
            }
            self.hyperparameters |= {*changes["fixed"]} - {*fixed}
            kept = {name: value for name, value in changes.items() if not _names(name, error.mistakes)}
            self.dropped |= {*changes} - {*kept} - {"fixed"}
        try:
            return self._lawful(space.override({**kept, "fixed": fixed}, self.origin.where, violations), violations)
        except InvalidValuesError:
            return space

    def _without(self, data: dict[str, Any], mistakes: Collection[str], whole: bool) -> dict[str, Any]:
        """Return the content of a search space file without the entries that have a mistake.

        Args:
            data: The content of the file.
            mistakes: The dotted names of the wrong values.
            whole: Whether an entry such as `objective` is dropped as a whole if only one of its values is wrong.
        """
        kept = dict(data)
        for name in mistakes:
            entry = name.partition(".")[0]
            values = kept.get(entry)
            inside = values if isinstance(values, dict) else {}
            own = max(
                (one for one in inside if isinstance(one, str) and _names(f"{entry}.{one}", [name])), default=None
            )
            if entry in ("space", "fixed") and own is not None:
                self.hyperparameters |= {*names_of(own)}
                kept[entry] = {key: one for key, one in inside.items() if key != own}
                if entry == "space":  # an axis with the same names, so that they can still be found there
                    count = len(names_of(own))
                    kept[entry][own] = {"grid": [[None] * count if count > 1 else None]}
            elif entry in GROUPS and own not in (None, "name") and not whole:
                self.dropped.add(f"{entry}.{own}")
                kept[entry] = {key: one for key, one in inside.items() if key != own}
            else:
                self.dropped.add(entry)
                kept.pop(entry, None)
        return self._completed(kept)

    def _completed(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a search space file with values for dropped entries, but without what needs them."""
        if "experiment" in self.dropped:
            data = {**data, "experiment": ""}
        if "search" in self.dropped:
            axes = data.get("space") or {}
            sampled = any(isinstance(axis, dict) and "grid" not in axis for axis in axes.values())
            data = {**data, "search": "random" if sampled else "grid"}
        if "fixed" in self.dropped:
            self.hyperparameters.add("fixed")  # stands for any hyperparameter
        lacking = NEED_ARMS if self.dropped & {*ARMS} else ()
        return {entry: value for entry, value in data.items() if entry not in lacking}

    def _lawful(self, space: SearchSpace, violations: list[str]) -> SearchSpace:
        """Return the search space without the entries that violate a rule, and add a message for each violation.

        A violation that names an entry with a mistake may follow from it and gets no message.
        """
        axes = [f"space.{key}" for key in space.space if {*names_of(key)} & self.hyperparameters]
        wrong = [f"`{name}{end}" for name in (*self.dropped, *self.hyperparameters, *axes) for end in ("`", ".")]
        for one in violations:
            if not self.unlawful and not any(name in one for name in wrong):
                self.mistakes.append(Mistake(f"{one}{'' if one.endswith('?') else '.'}"))
        self.unlawful = self.unlawful or bool(violations)
        replaced: dict[str, Any] = {}
        for one in violations:
            entry = one.removeprefix("`").partition("`")[0].partition(".")[0]
            if "`search.first" in one:
                replaced["search"] = space.search.model_copy(update={"first": ()})
            elif entry == "objective":
                replaced["objective"] = space.objective.model_copy(update={"against": None})
            elif entry in REPLACED and one.startswith("`"):
                replaced[entry] = REPLACED[entry]
            else:
                self.hyperparameters |= {
                    name
                    for key in space.space
                    if any(f"`space.{key}`" in one for one in violations)
                    for name in names_of(key)
                }
                return self._listable(_plain_axes(space))
        return self._listable(space.model_copy(update=replaced) if replaced else space)

    def _listable(self, space: SearchSpace) -> SearchSpace:
        """Return the search space, or raise UserError if it has so many arms that they cannot be checked."""
        if any(space.too_large()):
            raise self.origin.error(self.mistakes)
        return space


def _names(entry: str, mistakes: Collection[str]) -> bool:
    """Return whether a mistake in one of the dotted names in `mistakes` is a mistake in `entry`."""
    return any(name == entry or name.startswith(f"{entry}.") for name in mistakes)


def _plain_axes(space: SearchSpace) -> SearchSpace:
    """Return a search space in which only the names and values of the unconditional axes can be checked."""
    axes = {key: axis for key, axis in space.space.items() if not axis.when and len(names_of(key)) == 1}
    grid = all(axis.grid is not None for axis in axes.values())
    columns = tuple(name for name in space.columns if name in axes or name not in space.names)
    changes = {"space": axes, "columns": columns, "search": GridSearch() if grid else RandomSearch()}
    return space.model_copy(update={**REPLACED, "named": None, "ablate": None, **changes})
