"""A search space file: what varies around an experiment. No ray, no torch."""

import itertools
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedsweep.arms import NAMED, Arm, Reference, identity
from fedsweep.config import Config
from fedsweep.plain import Json
from fedsweep.sweep.ablation import Subsets, ablation_arms, compared_to


class Axis(Config):
    """The values of one hyperparameter: exactly one of these."""

    grid: tuple[Json, ...] | None = Field(None, min_length=1, description="every value, crossed with other grids")
    choice: tuple[Json, ...] | None = Field(None, min_length=1, description="one of these, sampled")
    uniform: tuple[float, float] | None = Field(None, description="a number between these, sampled")
    loguniform: tuple[float, float] | None = Field(None, description="the same, uniform in its logarithm")
    integer: tuple[int, int] | None = Field(None, description="a whole number from the first to the second, sampled")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            kinds = ", ".join(type(self).model_fields)
            raise ValueError(f"each entry of `space` must have exactly one of {kinds}, but one has {given or 'none'}")
        bounds = self.uniform or self.loguniform or self.integer
        if bounds and not bounds[0] < bounds[1]:
            raise ValueError(f"the bounds of `{given[0]}` must ascend, but they are {list(bounds)}")
        if self.loguniform and self.loguniform[0] <= 0:
            raise ValueError(f"the bounds of `loguniform` must be positive, but they are {list(self.loguniform)}")
        values = self.grid or self.choice
        if values and len({repr(value) for value in values}) < len(values):
            raise ValueError(f"the values of `{given[0]}` must differ, but they are {list(values)}")
        return self

    def extremes(self) -> tuple[Json, ...]:
        """Values whose validity speaks for the whole axis."""
        return self.grid or self.choice or self.uniform or self.loguniform or self.integer or ()


class GridSearch(Config):
    """Every arm of the grid with every seed."""

    name: Literal["grid"] = "grid"


class TPESearch(Config):
    """Optuna's tree-structured Parzen estimator."""

    name: Literal["tpe"] = "tpe"
    samples: int = Field(24, gt=0, description="configurations to try")
    startup: int = Field(8, ge=0, description="random configurations before the estimator is consulted")
    seed: int = Field(0, ge=0, description="root of the search's own randomness")


class RandomSearch(Config):
    """Independent samples."""

    name: Literal["random"] = "random"
    samples: int = Field(24, gt=0, description="configurations to try")
    seed: int = Field(0, ge=0, description="root of the search's own randomness")


class NoScheduler(Config):
    """Every trial runs to its last round."""

    name: Literal["none"] = "none"


class ASHAScheduler(Config):
    """Asynchronous successive halving over communication rounds, in the stopping variant that Ray has too."""

    name: Literal["asha"] = "asha"
    grace_rounds: int = Field(3, gt=0, description="the first rung; no trial is stopped before it")
    reduction_factor: float = Field(3, gt=1, description="eta: about 1 in eta trials survives a rung")


class Objective(Config):
    """What is compared and tuned."""

    metric: str = Field("accuracy/mean", description="a metric of each round")
    mode: Literal["max", "min"] = Field("max", description="whether more or less of it is better")


class Resources(Config):
    """What one trial is given."""

    cpus_per_trial: float = Field(1, ge=0.1, description="cores, and torch threads, of a trial")
    gpus_per_trial: float = Field(0, ge=0, description="GPUs of a trial; a fraction shares one")


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
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1, description="common to all arms, which makes them pairs")
    baseline: Arm | None = Field(
        default_factory=compared_to,
        description="the arm that others are compared to, each at its own values of what is not named here; "
        "of an `ablate` the full method",
    )
    reference: Reference | None = Field(None, description="a paper's values of arms, shown beside ours, never mixed in")
    measure: Annotated[Rounds | Parameters, Field(discriminator="name")] = Field(
        Rounds(), description="what is measured of each arm: rounds that are played, or parameters that are counted"
    )
    objective: Objective = Field(default_factory=Objective)
    search: Annotated[GridSearch | TPESearch | RandomSearch, Field(discriminator="name")]
    scheduler: Annotated[NoScheduler | ASHAScheduler, Field(discriminator="name")]
    resources: Resources = Field(default_factory=Resources)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        gridded = self.search.name == "grid"
        self._check_arms_in_words(gridded)
        for name, axis in self.space.items():
            if (axis.grid is not None) != gridded:
                wanted = "`grid` values" if gridded else "a range or `choice`, not `grid`"
                raise ValueError(f"`search` {self.search.name} needs {wanted}, which `space.{name}` does not give")
        if "seed" in {*self.names, *self.fixed}:
            raise ValueError("seeds are given by `seeds`, not as a hyperparameter of the space")
        self._check_names()
        if both := sorted(set(self.names) & set(self.fixed)):
            raise ValueError(f"`{both[0]}` is varied by the search space and cannot be fixed as well")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"`seeds` must be different and not negative, but they are {list(self.seeds)}")
        if not gridded and self.measure.name == "parameters":
            raise ValueError(
                f"`measure` parameters counts the arms of a grid, and `search` {self.search.name} has none"
            )
        if not gridded and len(self.seeds) > 1:
            raise ValueError(
                f"`search` {self.search.name} runs each sample once: give one seed, not {list(self.seeds)}"
            )
        self._check_arms(gridded)
        return self

    @property
    def names(self) -> list[str]:
        """All dotted names that vary."""
        own = dict.fromkeys(name for changes in (self.named or {}).values() for name in changes)
        return [*self._axis_names, *own, *(self.ablate or ())]

    @property
    def _axis_names(self) -> list[str]:
        return [name for key in self.space for name in names_of(key)]

    def _check_arms_in_words(self, gridded: bool) -> None:
        if self.ablate is None and self.named is None and not self.space:
            raise ValueError("`space`, `named` or `ablate` must say what varies, but none does")
        if self.ablate is None and self.subsets != "one":
            raise ValueError(f"`subsets` {self.subsets} is of the components of `ablate`, of which there are none")
        for entry in ("ablate", "named"):
            if getattr(self, entry) is not None and not gridded:
                raise ValueError(f"`{entry}` needs `search` grid, but it is {self.search.name}")
        for name, changes in (self.named or {}).items():
            if both := sorted({*self._axis_names, *(self.ablate or ())} & {*changes}):
                raise ValueError(
                    f"`{both[0]}` is changed by the arm `{name}` of `named` and cannot be varied otherwise as well"
                )
        if both := sorted(set(self._axis_names) & set(self.ablate or ())):
            raise ValueError(f"`{both[0]}` is left out by `ablate` and cannot be varied by `space` as well")

    def _check_names(self) -> None:
        names = self._axis_names
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"`{twice[0]}` is varied twice by `space`")
        for key, axis in self.space.items():
            count = len(names_of(key))
            if count > 1 and axis.grid is None:
                raise ValueError(f"several names together need `grid` values, which `space.{key}` does not give")
            for value in (axis.grid or ()) if count > 1 else ():
                if not isinstance(value, list) or len(value) != count:
                    raise ValueError(
                        f"each value of `space.{key}` must be a list of {count}, one for each name, not {value}"
                    )

    def _check_arms(self, gridded: bool) -> None:
        named = {"baseline": self.baseline} if self.baseline is not None else {}
        for place, one in enumerate(self.reference.arms if self.reference else ()):
            named[f"reference.arms.{place}.arm"] = one.arm
        arms = self.arms() if gridded else []
        known = {identity(arm) for arm in arms}
        for entry, arm in named.items():
            if not gridded:
                raise ValueError(f"`{entry}` names an arm of a grid, and `search` {self.search.name} has none")
            open_to_several = entry == "baseline" and arm and any(_agree(arm, one) for one in arms)
            if identity(arm) not in known and not open_to_several:
                raise ValueError(f"`{entry}` must be one of the arms, but {arm} is not")

    def arms(self) -> list[Arm]:
        """All arms of a grid, in the order of the file; those of an ablation together, the full method first."""
        axes = [[_valued(key, value) for value in axis.grid or ()] for key, axis in self.space.items()]
        if self.named is not None:
            axes.append([{NAMED: name} for name in self.named])
        if self.ablate is not None:
            axes.append(ablation_arms(list(self.ablate), self.subsets))
        return [{name: value for one in arm for name, value in one.items()} for arm in itertools.product(*axes)]


def names_of(key: str) -> list[str]:
    """The names that vary together on one axis.

    >>> names_of("lora.rank"), names_of("method, optimizer")
    (['lora.rank'], ['method', 'optimizer'])
    """
    return [name.strip() for name in key.split(",")]


def _agree(part: Arm, arm: Arm) -> bool:
    """Whether the arm has every value of the part."""
    return all(name in arm and identity(arm[name]) == identity(value) for name, value in part.items())


def _valued(key: str, value: Json) -> Arm:
    names = names_of(key)
    return dict(zip(names, value, strict=True)) if len(names) > 1 and isinstance(value, list) else {key: value}
