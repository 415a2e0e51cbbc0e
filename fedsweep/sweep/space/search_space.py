"""Search spaces: YAML files that define which hyperparameters of an experiment vary and how they are searched."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, ClassVar

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import near
from fedsweep.common.yaml_values import Json
from fedsweep.results.arms import ABLATED, NAMED, Arm, Reference
from fedsweep.results.declared_comparisons import Declared
from fedsweep.results.history import MEAN_ACCURACY, VALIDATION
from fedsweep.results.seeds import SEED_STREAMS, Seeds, UntilDecided, varied_streams
from fedsweep.sweep.space.axes import Axis, Conditions, Resolve, asking_order, concerns, names_of, valued
from fedsweep.sweep.space.comparison_rules import wrong_comparisons, wrong_until_decided
from fedsweep.sweep.space.designs import Design, Factorial, Subsets, ablation_arms, grid_size, too_many_arms
from fedsweep.sweep.space.settings import (
    Goal,
    GridSearch,
    NoScheduler,
    Objective,
    Parameters,
    RandomSearch,
    Resources,
    Rounds,
    Scheduler,
    Search,
    TPESearch,
    population_violations,
)
from fedsweep.sweep.space.tuned_axes import TuneEach, wrong_tuning

PROBED = 4096
"""Largest number of value combinations that are all validated before a sampled search.

If there are more combinations, the validated arms contain all pairs of values instead.
"""


class SearchSpace(Config):
    """A set of runs that vary hyperparameters of one experiment."""

    what_a_name_is: ClassVar[str] = "an entry of a search space"

    experiment: str = Field(description="name of the experiment that the search space varies")
    fixed: dict[str, Json] = Field(default_factory=dict, description="changes to the experiment that apply to all arms")
    ablate: dict[str, Json] | None = Field(
        None,
        min_length=1,
        description="components to leave out: dotted names, each with the value that switches the component off",
    )
    subsets: Subsets = Field(
        "one",
        description="arms of `ablate` in addition to the full method: `one` leaves out one component at a time, "
        "`all` leaves out every combination of components",
    )
    named: dict[str, dict[str, Json]] | None = Field(
        None, min_length=1, description="arms by name, each with its changes to the experiment"
    )
    space: dict[str, Axis] = Field(
        default_factory=dict,
        description="hyperparameters that vary: one axis per dotted name; names separated by commas share an axis and "
        "vary together",
    )
    exclude: tuple[Arm, ...] = Field(
        (),
        description="arms to leave out of a grid, each as values by dotted name; an entry that gives only some values "
        "leaves out all arms with these values",
    )
    tune_each: TuneEach | None = Field(None, description="hyperparameters that are tuned for each arm")
    design: Design = Field(
        "full",
        description="arms of a grid: `full` has all combinations, `one_factor` changes one baseline value at a time",
    )
    seeds: Seeds = Field(
        (0, 1, 2),
        description="seeds that every arm runs with; arms are compared seed by seed; or `{until: decided}`: seeds 0, "
        "1, 2, ... until the comparisons of the arm are decided; or `{list: [0, 1, 2], vary: [...]}`",
    )
    baseline: Arm | None = Field(
        default_factory=lambda given: Arm({ABLATED: []}) if given.get("ablate") else None,
        description="arm that the other arms are compared with, by default the full method of `ablate`; if the "
        "baseline has no value for an axis, each arm is compared with the baseline at the arm's own value of that axis",
    )
    comparisons: Declared = Field(
        (),
        description="comparisons to test besides those with the baseline, each as `{arm: ..., against: ..., metric: "
        "...}`; or `all`: all pairs of arms",
    )
    reference: Reference | None = Field(
        None, description="values from a paper, shown next to yours and never mixed with them"
    )
    columns: tuple[str, ...] = Field(
        (),
        description="columns of the table besides the objective, by name or by metric; empty for the default columns",
    )
    measure: Annotated[Rounds | Parameters, Field(discriminator="name")] = Field(
        Rounds(), description="whether the arms are trained, or only their parameters are counted"
    )
    objective: Objective = Field(default_factory=Objective)
    search: Search = GridSearch()
    scheduler: Scheduler = NoScheduler()
    resources: Resources = Field(default_factory=Resources)

    def _violations(self) -> Iterator[str]:
        search, scheduler, against = self.search, self.scheduler, self.objective.against
        if self.ablate is None and self.named is None and not self.space:
            yield "at least one of `space`, `named` and `ablate` must be given, but none is"
        if self.ablate is None and self.subsets != "one":
            yield f"`subsets` {self.subsets} needs components in `ablate`, but there are none"
        for name, axis in self.space.items():
            if (axis.grid is not None) != (search.name == "grid"):
                kind = "`grid` values" if search.name == "grid" else "a range or a `choice`"
                hint = "; to sample from ranges, write `search: {name: tpe, samples: 24}`" * (search.name == "grid")
                yield f"`search` {search.name} needs {kind} for each axis, but `space.{name}` has `{axis.kind}`{hint}"
        yield from self._wrong_names()
        yield from self.too_large()
        yield from wrong_tuning(self)
        if isinstance(self.seeds, UntilDecided):
            yield from wrong_until_decided(self)
        elif len(set(seeds := self.planned_seeds)) < len(seeds) or min(seeds) < 0:
            yield f"`seeds` must be distinct and not negative, but they are {list(seeds)}"
        if search.name != "grid":
            yield from self._wrong_in_a_sampled(search)
        if self.comparisons:
            yield from wrong_comparisons(self)
        if self.design == "one_factor" and self.baseline is None:
            yield "`design` one_factor needs a `baseline`, of which it changes one value at a time, but there is none"
        if scheduler.name == "pbt":
            yield from population_violations(search, self.space, scheduler)
        for name in getattr(scheduler, "per", ()):
            if name not in self._axis_names:
                rule = "must list hyperparameters that `space` varies"
                yield f"`scheduler.per` {rule}, but it has `{name}`{near(name, self._axis_names)}"
        if against is not None and scheduler.name != "none":
            needs = f"`objective.against` {against.metric} needs `scheduler` none"
            yield f"{needs}, but it is {scheduler.name}, which prunes by a single objective"
        if against is not None and self.measure.name == "parameters":
            yield "`objective.against` needs trained trials, but `measure` parameters trains none"
        try:
            asking_order(self.space)
        except ValueError as error:
            yield str(error)

    @property
    def chooses(self) -> bool:
        """True if trials are sampled or pruned, so that metrics decide what runs and which trials finish."""
        return self.search.name != "grid" or self.scheduler.name != "none"

    @property
    def goal(self) -> Goal:
        """The objective, in which the metric is known."""
        asked = self.objective
        default = f"{VALIDATION}{MEAN_ACCURACY}" if self.chooses else MEAN_ACCURACY
        return Goal(asked.metric or default, asked.mode, asked.against)

    @property
    def planned_seeds(self) -> tuple[int, ...]:
        """The seeds that every arm runs with or, with `{until: decided}`, that it may run with."""
        return self.seeds if isinstance(self.seeds, tuple) else self.seeds.seeds

    @property
    def until_decided(self) -> UntilDecided | None:
        """The rule by which arms get further seeds, or None if every arm runs with the same seeds."""
        return self.seeds if isinstance(self.seeds, UntilDecided) else None

    def too_large(self) -> Iterator[str]:
        """Yield an error message if the arms of a grid cannot be listed, because there are too many."""
        if self.search.name == "grid" and (self.design == "full" or self.reference is not None):
            yield from too_many_arms(self._most_arms())

    def most_trials(self) -> int:
        """Return an upper bound on the number of trials.

        The conditions or the design of a grid can leave out arms. For population-based training, the result is the size
        of the first generation.
        """
        return self.search.samples if self.search.name != "grid" else self._most_arms() * len(self.planned_seeds)

    def _most_arms(self) -> int:
        levels = [*(len(axis.grid or [0]) for axis in self.space.values()), len(self.named or [0])]
        return grid_size(levels, len(self.ablate or ()), self.subsets)

    def _wrong_in_a_sampled(self, search: TPESearch | RandomSearch) -> Iterator[str]:
        needs_grid, seeds = f"needs `search` grid, but it is {search.name}", list(self.planned_seeds)
        for given, sentence in (
            (self.ablate, f"`ablate` {needs_grid}"),
            (self.named, f"`named` {needs_grid}"),
            (self.exclude, f"`exclude` {needs_grid}"),
            (self.measure.name == "parameters", f"`measure` parameters {needs_grid}"),
            (
                self.until_decided is None and seeds[1:],
                f"`seeds` must be a single seed for `search` {search.name}, but they are {seeds}",
            ),
            (self.scheduler.name == "arms", f"`scheduler` arms {needs_grid}"),
            (self.baseline is not None and not self.ablate, f"`baseline` {needs_grid}"),  # `ablate` has a default
            (self.reference, f"`reference` {needs_grid}"),
            (self.design == "one_factor", f"`design` one_factor {needs_grid}"),
        ):
            if given:
                yield sentence
        if len(search.first) > search.samples:
            yield f"`search.first` has {len(search.first)} points, but `search.samples` allows only {search.samples}"
        for place, point in enumerate(search.first):
            if not point:
                yield f"`search.first.{place}` must have a value for at least one axis, but it is empty"
            for name, value in point.items():
                if (axis := self.space.get(name)) is None:
                    yield f"`search.first.{place}` sets `{name}`, which `space` does not vary{near(name, self.space)}"
                elif not axis.has(value):
                    yield f"`{name}` in `search.first.{place}` must be {axis.wanted()}, but it is {value}"

    @property
    def names(self) -> list[str]:
        """The dotted names of all hyperparameters that the settings `space`, `named` and `ablate` vary."""
        own = dict.fromkeys(name for changes in (self.named or {}).values() for name in changes)
        return [*self._axis_names, *own, *(self.ablate or ())]

    @property
    def _axis_names(self) -> list[str]:
        return [name for key in self.space for name in names_of(key)]

    def _wrong_names(self) -> Iterator[str]:
        names, ablated = self._axis_names, {*(self.ablate or ())}
        told: set[str] = set()
        for name, changes in (self.named or {}).items():
            for both in sorted({*names, *ablated} & {*changes} - told)[:1]:
                told.add(both)
                rule = "cannot also vary in `space` or `ablate`"
                yield f"`{both}` is changed by the arm `{name}` of `named` and {rule}"
        if both := sorted({*names} & ablated):
            yield f"`{both[0]}` is left out by `ablate` and cannot also vary in `space`"
        if "seed" in {*self.names, *self.fixed}:
            yield "`seed` must not be a hyperparameter of the search space; list the seeds in `seeds`"
        if SEED_STREAMS in self.names:
            yield f"`{SEED_STREAMS}` must be the same for all arms; name the streams in `seeds.vary`"
        elif SEED_STREAMS in self.fixed and varied_streams(self.seeds) is not None:
            yield f"`{SEED_STREAMS}` is set in `fixed` and by `seeds.vary`; leave out one of them"
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"`space` varies `{twice[0]}` twice"
        for key, axis in self.space.items():
            if (count := len(names_of(key))) == 1:
                continue
            if axis.grid is None and self.search.name != "grid":
                yield f"an axis of several names needs `grid` values, but `space.{key}` has `{axis.kind}`"
            for value in axis.grid or ():
                if not isinstance(value, list) or len(value) != count:
                    yield f"each value of `space.{key}` must list {count} values, one for each name, but one is {value}"
        if both := sorted({*self.names} & {*self.fixed}):
            yield f"`{both[0]}` is varied by the search space and cannot also be in `fixed`"

    def arms(self, resolve: Resolve, design: Design | None = None) -> list[Arm]:
        """Return the arms of a grid in the order of the YAML file.

        If `design` is given, it is used instead of the design in the file.

        Raises:
            ValueError: The design is `one_factor`, and the baseline is not one of the arms.
        """
        factors = {key: [valued(key, value) for value in axis.grid or ()] for key, axis in self.space.items()}
        if self.named is not None:
            factors[NAMED] = [{NAMED: name} for name in self.named]
        if self.ablate is not None:
            factors[ABLATED] = ablation_arms(list(self.ablate), self.subsets)
        factorial = self._factorial(factors, resolve)
        return (
            factorial.one_factor(self.baseline or {}) if (design or self.design) == "one_factor" else factorial.full()
        )

    def next_name(self, drawn: Arm, resolve: Resolve) -> str | None:
        """Return the key of the next active axis that has no value in `drawn`, or None if the arm is complete.

        Call this method after each drawn value, because the value may activate other axes.
        """
        conditions = Conditions(self.space, resolve)
        missing = (key for key in asking_order(self.space) if key not in drawn)
        return next((key for key in missing if conditions.active(key, drawn)), None)

    def exact(self, drawn: Arm) -> Arm:
        """Return the sampled values of an arm without rounding errors, e.g. 0.15 instead of 0.15000000000000002."""
        return {name: self.space[name].exact(value) if name in self.space else value for name, value in drawn.items()}

    def probes(self, resolve: Resolve) -> list[Arm]:
        """Return the arms that are validated before a sampled search starts.

        The arms are all combinations of the values that `Axis.probes` returns. If there are more than 4096
        combinations, a smaller set of arms is returned that contains every possible pair of values.
        """
        asked = [one for axis in self.space.values() for one in axis.conditions.items()]
        wanted = {key: tuple(v for name, values in asked if name == key for v in values) for key in self.space}
        factors = {key: [{key: value} for value in axis.probes(wanted[key])] for key, axis in self.space.items()}
        factorial = self._factorial(factors, resolve)
        picked = list(islice(factorial.every(), PROBED + 1))
        if len(picked) > PROBED:
            deciding = {key for key in self.space if any(concerns(axis, key) for axis in self.space.values())}
            picked = factorial.pairs(deciding, PROBED)
        return [factorial.arm(one) for one in picked]

    def _factorial(self, factors: Mapping[str, Sequence[Arm]], resolve: Resolve) -> Factorial:
        first = [key for key in factors if key not in self.space]  # named and ablation arms, which have no conditions
        return Factorial(factors, [*first, *asking_order(self.space)], Conditions(self.space, resolve).active)
