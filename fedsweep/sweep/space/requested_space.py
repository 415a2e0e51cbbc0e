"""A requested search space: its file, the user's changes, and the experiment that it starts from. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedsweep.common.errors import UserError
from fedsweep.common.paths import find
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.sweep.space.search_space import SearchSpace


@dataclass(frozen=True)
class RequestedSpace:
    """A search space with the user's changes, before its experiment is read."""

    name: str
    space: SearchSpace
    """The search space, with all changes applied."""
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

    @property
    def other_data(self) -> bool:
        """True if the user changed the experiment or the data of the search space."""
        return "experiment" in self.options or any(name.split(".")[0] == "data" for name in self.overrides)


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
    if "search.warm_start" in options and space.search.name != "tpe":
        raise UserError(
            f"--warm-start is for `search` tpe, which learns from results, but {where} has {space.search.name}."
        )
    space = space.override({**options, "fixed": {**space.fixed, **overrides}}, where)
    experiment = find("experiments", space.experiment, "" if "experiment" in options else where)
    files = {"search_space.yaml": path, "experiment.yaml": experiment}
    return RequestedSpace(name, space, files, dict(overrides), dict(options))
