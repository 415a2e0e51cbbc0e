"""The search space, a YAML file with the hyperparameters that vary around an experiment, and requests for one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedsweep.common.config import Config
from fedsweep.common.errors import UserError, near
from fedsweep.common.paths import find
from fedsweep.common.process_usage import logical_gpus
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.results.arms import ABLATED, NAMED, Arm, Reference
from fedsweep.sweep.space.axes import Axis, Conditions, Resolve, asking_order, concerns, names_of
from fedsweep.sweep.space.designs import Design, Factorial, Subsets, ablation_arms
from fedsweep.sweep.space.settings import Objective, RandomSearch, Scheduler, Search, TPESearch, population_violations

PROBED = 4096
"""Number of value combinations up to which a sampled search checks all; above it, all pairs of values."""


class Resources(Config):
    """What one trial is given."""

    cpus_per_trial: float = Field(1, ge=0.1, description="cores, and torch threads, of a trial")
    gpus_per_trial: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        0.0, description="GPUs of a trial; a fraction shares one, and `auto` measures how many trials can"
    )
    system_metrics: bool = Field(
        False, description="whether each round also records what the machine did, as `system/...` in MLflow"
    )

    @property
    def threads(self) -> int:
        """Number of torch threads of a trial."""
        return max(int(self.cpus_per_trial), 1)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device on which a trial computes."""
        return "cuda" if self.on_gpu and logical_gpus() is None else "cpu"

    @property
    def on_gpu(self) -> bool:
        """True if a trial gets a GPU or a share of one."""
        return self.gpus_per_trial == "auto" or self.gpus_per_trial > 0


class Rounds(Config):
    """Every trial is played, and what its rounds report is compared."""

    name: Literal["rounds"] = "rounds"


class Parameters(Config):
    """Parameters and bytes are counted from shapes: no weights, no data, nothing trained and nothing recorded."""

    name: Literal["parameters"] = "parameters"
    classes: int = Field(100, gt=1, description="classes of the head")


class SearchSpace(Config):
    """A set of runs around an experiment."""

    what_a_name_is: ClassVar[str] = "an entry of a search space"

    experiment: str = Field(description="the experiment that it starts from")
    fixed: dict[str, Json] = Field(default_factory=dict, description="changes to the experiment, the same in all arms")
    ablate: dict[str, Json] | None = Field(
        None,
        min_length=1,
        description="components of the method: what each dotted name is set to where the component is left out",
    )
    subsets: Subsets = Field(
        "one", description="arms of `ablate` beside the full method: `one` component left out, or `all` sets of them"
    )
    named: dict[str, dict[str, Json]] | None = Field(
        None, min_length=1, description="arms by what they are called, each with its changes to the experiment"
    )
    space: dict[str, Axis] = Field(
        default_factory=dict,
        description="what varies: an axis under each dotted name, or a `grid` of lists under several names with commas",
    )
    design: Design = Field(
        "full",
        description="arms of a grid: `full`, all of them, or `one_factor`, the baseline and each other value alone",
    )
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1, description="common to all arms, which makes them pairs")
    baseline: Arm | None = Field(
        default_factory=lambda given: Arm({ABLATED: []}) if given.get("ablate") else None,
        description="the arm that others are compared to, each at its own values of what is not named here; "
        "of an `ablate` the full method",
    )
    reference: Reference | None = Field(None, description="a paper's values of arms, shown beside ours, never mixed in")
    columns: tuple[str, ...] = Field(
        (),
        description="what the table shows beside the objective: columns by name, or metrics; empty for the usual",
    )
    measure: Annotated[Rounds | Parameters, Field(discriminator="name")] = Field(
        Rounds(), description="what is measured of each arm: rounds that are played, or parameters that are counted"
    )
    objective: Objective = Field(default_factory=Objective)
    search: Search
    scheduler: Scheduler
    resources: Resources = Field(default_factory=Resources)

    def _violations(self) -> Iterator[str]:
        search, scheduler, against = self.search, self.scheduler, self.objective.against
        if self.ablate is None and self.named is None and not self.space:
            yield "`space`, `named` or `ablate` must say what varies, but none does"
        if self.ablate is None and self.subsets != "one":
            yield f"`subsets` {self.subsets} is of the components of `ablate`, of which there are none"
        for name, axis in self.space.items():
            if (axis.grid is not None) != (search.name == "grid"):
                kind = "`grid` values" if search.name == "grid" else "a range or `choice`, not `grid`"
                yield f"`search` {search.name} needs {kind}, which `space.{name}` does not give"
        yield from self._wrong_names()
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            yield f"`seeds` must be different and not negative, but they are {list(self.seeds)}"
        if search.name != "grid":
            yield from self._wrong_in_a_sampled(search)
        if self.design == "one_factor" and self.baseline is None:
            yield "`design` one_factor needs a `baseline` around which one value at a time is changed"
        if scheduler.name == "pbt":
            yield from population_violations(search, self.space, scheduler)
        for name in getattr(scheduler, "per", ()):
            if name not in self._axis_names:
                hint = near(name, self._axis_names).rstrip("?")
                yield f"`scheduler.per` must name hyperparameters that `space` varies, but {name} is none{hint}"
        if against is not None and scheduler.name != "none":
            second = f"`objective.against` {against.metric} is a second one: it needs `scheduler` none"
            yield f"`scheduler` {scheduler.name} prunes by one objective, and {second}"
        if against is not None and self.measure.name == "parameters":
            yield "`objective.against` is of trials that are played, and `measure` parameters plays none"
        asking_order(self.space)

    def _wrong_in_a_sampled(self, search: TPESearch | RandomSearch) -> Iterator[str]:
        none = f"and `search` {search.name} has none"
        for given, sentence in (
            (self.ablate, f"`ablate` needs `search` grid, but it is {search.name}"),
            (self.named, f"`named` needs `search` grid, but it is {search.name}"),
            (self.measure.name == "parameters", f"`measure` parameters counts the arms of a grid, {none}"),
            (self.seeds[1:], f"`search` {search.name} runs each sample once: give one seed, not {list(self.seeds)}"),
            (self.scheduler.name == "arms", f"`scheduler` arms prunes arms of a grid, {none}"),
            (self.baseline is not None, f"`baseline` names an arm of a grid, {none}"),
            (self.reference, f"`reference.arms.0.arm` names an arm of a grid, {none}"),
            (self.design == "one_factor", f"`design` one_factor is of a grid, {none}"),
        ):
            if given:
                yield sentence
        if len(search.first) > search.samples:
            yield f"`search.first` has {len(search.first)} points, but `search.samples` is {search.samples}"
        for place, point in enumerate(search.first):
            if not point:
                yield f"`search.first.{place}` must give a value of `space`, but it is empty"
            for name, value in point.items():
                if (axis := self.space.get(name)) is None:
                    yield f"`search.first.{place}` names `{name}`, which `space` does not vary{near(name, self.space)}"
                elif not axis.has(value):
                    yield f"`search.first.{place}`: `{name}` must be {axis.wanted()}, but it is {value}"

    @property
    def names(self) -> list[str]:
        """The dotted names that vary, in axes, named arms or an ablation."""
        own = dict.fromkeys(name for changes in (self.named or {}).values() for name in changes)
        return [*self._axis_names, *own, *(self.ablate or ())]

    @property
    def _axis_names(self) -> list[str]:
        return [name for key in self.space for name in names_of(key)]

    def _wrong_names(self) -> Iterator[str]:
        names, ablated = self._axis_names, {*(self.ablate or ())}
        for name, changes in (self.named or {}).items():
            if both := sorted({*names, *ablated} & {*changes}):
                yield f"`{both[0]}` is changed by the arm `{name}` of `named` and cannot be varied otherwise as well"
        if both := sorted({*names} & ablated):
            yield f"`{both[0]}` is left out by `ablate` and cannot be varied by `space` as well"
        if "seed" in {*self.names, *self.fixed}:
            yield "seeds are given by `seeds`, not as a hyperparameter of the space"
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"`{twice[0]}` is varied twice by `space`"
        for key, axis in self.space.items():
            if (count := len(names_of(key))) == 1:
                continue
            if axis.grid is None:
                yield f"several names together need `grid` values, which `space.{key}` does not give"
            for value in axis.grid or ():
                if not isinstance(value, list) or len(value) != count:
                    yield f"each value of `space.{key}` must be a list of {count}, one for each name, not {value}"
        if both := sorted({*self.names} & {*self.fixed}):
            yield f"`{both[0]}` is varied by the search space and cannot be fixed as well"

    def arms(self, resolve: Resolve, design: Design | None = None) -> list[Arm]:
        """Return the arms of a grid in the order of the file; raise ValueError if one_factor has no valid baseline."""
        factors = {key: [_valued(key, value) for value in axis.grid or ()] for key, axis in self.space.items()}
        if self.named is not None:
            factors[NAMED] = [{NAMED: name} for name in self.named]
        if self.ablate is not None:
            factors[ABLATED] = ablation_arms(list(self.ablate), self.subsets)
        factorial = self._factorial(factors, resolve)
        return (
            factorial.one_factor(self.baseline or {}) if (design or self.design) == "one_factor" else factorial.full()
        )

    def next_name(self, drawn: Arm, resolve: Resolve) -> str | None:
        """Return the next active axis to draw from, or None if the arm is complete; each draw may activate others."""
        conditions = Conditions(self.space, resolve)
        missing = (key for key in asking_order(self.space) if key not in drawn)
        return next((key for key in missing if conditions.active(key, drawn)), None)

    def exact(self, drawn: Arm) -> Arm:
        """Return drawn values without rounding errors: 0.15 for 0.15000000000000002 in steps of 0.05."""
        return {name: self.space[name].exact(value) if name in self.space else value for name, value in drawn.items()}

    def probes(self, resolve: Resolve) -> list[Arm]:
        """Return arms of a sampled search to validate in place of all: the `Axis.probes`, combined.

        Above `PROBED` combinations, the arms contain every reachable pair of values instead.
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
        first = [key for key in factors if key not in self.space]  # named and ablation arms, which depend on nothing
        return Factorial(factors, [*first, *asking_order(self.space)], Conditions(self.space, resolve).active)


def _valued(key: str, value: Json) -> Arm:
    names = names_of(key)
    return dict(zip(names, value, strict=True)) if len(names) > 1 and isinstance(value, list) else {key: value}


@dataclass(frozen=True)
class RequestedSpace:
    """A search space with the user's changes, before its experiment is read."""

    name: str
    space: SearchSpace
    files: Mapping[str, Path]
    """The YAML files, by the name of the copy in the sweep's folder."""
    overrides: Mapping[str, Json]
    """Changes to the experiment, by dotted name."""
    options: Mapping[str, Json]
    """Changes to the search space, by dotted name."""

    @property
    def where(self) -> str:
        """The beginning of an error message about the space."""
        return f"search space {self.name}"

    @property
    def counted(self) -> bool:
        """True if the space counts parameters and runs nothing."""
        return self.space.measure.name == "parameters"


def read(name: str, overrides: Mapping[str, Json], options: Mapping[str, Json]) -> RequestedSpace:
    """Read a search space and apply the user's changes; raise UserError if the space or a change is invalid."""
    path = find("search_spaces", name)
    where = f"search space {name}"
    space = SearchSpace.of(read_yaml(path), where)
    for changed in overrides:
        if changed in space.names or any(changed.startswith(f"{varied}.") for varied in space.names):
            raise UserError(f"`{changed}` is varied by {where} and cannot be overridden.")
    if "seed" in overrides:
        raise UserError(f"the seeds of {where} are given by --seeds, not by `seed`.")
    if "search.samples" in options and space.search.name == "grid":
        raise UserError(f"--samples is for a sampled search, but {where} runs every arm of its grid.")
    if "search.warm_start" in options and (search := space.search.name) != "tpe":
        raise UserError(f"--warm-start is for `search` tpe, which learns from results, but {where} has {search}.")
    space = space.override({**options, "fixed": {**space.fixed, **overrides}}, where)
    experiment = find("experiments", space.experiment, "" if "experiment" in options else where)
    files = {"search_space.yaml": path, "experiment.yaml": experiment}
    return RequestedSpace(name, space, files, dict(overrides), dict(options))
