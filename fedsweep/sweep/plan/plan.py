"""From a search space to trials: resolved, checked and keyed before anything starts. No ray."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import metadata
from typing import Any

from fedsweep.common.config import flat
from fedsweep.common.errors import UserError
from fedsweep.common.paths import find
from fedsweep.common.randomness import stream
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.data.data_config import load
from fedsweep.federation.run import check_content, content_digests
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import OwnWeights
from fedsweep.results import Start, TrialPlan
from fedsweep.results.arms import Arm, Reference, arm_label
from fedsweep.sweep.plan.checks import OF_DOMAINS, check, resolved
from fedsweep.sweep.plan.code_identity import ENGINE_PACKAGES, engine_digest
from fedsweep.sweep.space.ablation import changes, left_out_values
from fedsweep.sweep.space.designs import Design
from fedsweep.sweep.space.search_space import SearchSpace


class Plan:
    """A search space around its experiment, checked as a whole."""

    def __init__(
        self,
        name: str,
        space: SearchSpace,
        base: RunConfig,
        files: Mapping[str, str],
        changes: Mapping[str, dict[str, Json]],
    ) -> None:
        self.name, self.space, self.base, self.files, self.changes = name, space, base, dict(files), dict(changes)
        self.left_out = left_out_values(space.ablate or {}, flat(base))
        self.engine_digest = engine_digest()

    @classmethod
    def read(cls, name: str, changes: Mapping[str, Json], space_changes: Mapping[str, Json]) -> "Plan":
        """Open a search space and its experiment, apply the user's changes, and check every arm.

        Raises:
            UserError: anything is wrong with either file or the changes.
        """
        path = find("search_spaces", name)
        where = f"search space {name}"
        space = SearchSpace.of(read_yaml(path), where)
        for changed in changes:
            if changed in space.names or any(changed.startswith(f"{varied}.") for varied in space.names):
                raise UserError(f"`{changed}` is varied by {where} and cannot be overridden.")
        if "seed" in changes:
            raise UserError(f"the seeds of {where} are given by --seeds, not by `seed`.")
        if "search.samples" in space_changes and space.search.name == "grid":
            raise UserError(f"--samples is for a sampled search, but {where} runs every arm of its grid.")
        if "search.warm_start" in space_changes and space.search.name != "tpe":
            raise UserError(
                f"--warm-start is for `search` tpe, which learns from results, but {where} has {space.search.name}."
            )
        space = space.override({**space_changes, "fixed": {**space.fixed, **changes}}, where)
        experiment = find("experiments", space.experiment, "" if "experiment" in space_changes else where)
        base = RunConfig.of(read_yaml(experiment), f"experiment {space.experiment}")
        base = base.override(space.fixed, where)
        files = {"search_space.yaml": path.read_text(), "experiment.yaml": experiment.read_text()}
        plan = cls(name, space, base, files, {"overrides": dict(changes), "options": dict(space_changes)})
        check(plan)
        return plan

    @property
    def reference(self) -> Reference | None:
        """The paper's values, unless the user took data that lacks its domains."""
        if (paper := self.space.reference) is None:
            return None
        of_domains = {name for name in paper.metrics() if name.startswith(OF_DOMAINS)}  # of counts, none is
        for _, config in self.configs if of_domains else []:
            of_domains -= {*config.metrics()}
        return None if of_domains else paper

    @property
    def other_data(self) -> bool:
        """Whether the user runs the space on an experiment, or on data, that its file does not name."""
        overrides = self.changes["overrides"]
        return "experiment" in self.changes["options"] or any(name.split(".")[0] == "data" for name in overrides)

    def preflight(self) -> None:
        """Open what the trials read, and divide it as they will, so that nothing is missed once workers run.

        Raises:
            UserError: data or weights are not there, do not fit, or cannot be divided among the clients.
        """
        seen: set[str] = set()
        for config in self.reachable():
            load(config.data)  # what is missing is told in the order in which it is got
            asked = config.model_dump_json(
                include={"data", "partition", "synthetic", "federation", "seed", "backbone", "evaluation"}
            )
            asked += f"{OwnWeights.of_method(config.method).fingerprint()} {config.trains_on_synthetic}"
            if asked not in seen:
                seen.add(asked)
                check_content(config)

    @cached_property
    def arms(self) -> list[Arm]:
        """Every arm of a grid, or of another design around its baseline; none of a sampled search."""
        return self._arms(self.space.design)

    @cached_property
    def crossed(self) -> list[Arm]:
        """Every arm of the grid, whatever the design takes of them."""
        return self._arms("full")

    def _arms(self, design: Design) -> list[Arm]:
        try:
            return [] if self.sampled is not None else self.space.arms(self.tentative, design)
        except ValueError as error:
            raise UserError(f"search space {self.name}: {error}.") from None

    @cached_property
    def probes(self) -> list[Arm]:
        """What speaks for all that may run: the arms of a grid, or combinations of a sampled search's values."""
        return self.arms if self.sampled is None else self.space.probes(self.tentative)

    @cached_property
    def configs(self) -> list[tuple[Arm, RunConfig]]:
        """The probes with their whole configurations, under the first seed."""
        return resolved(self, self.probes, self.space.seeds[0])

    def reachable(self) -> Iterator[RunConfig]:
        """The run of every arm and seed; of a sampled search those that speak for all that may run."""
        yield from (config for _, config in self.configs)
        yield from (self.resolve(arm, seed) for arm in self.probes for seed in self.space.seeds[1:])

    @property
    def counted(self) -> bool:
        """Whether parameters are counted and nothing is run."""
        return self.space.measure.name == "parameters"

    @property
    def sampled(self) -> int | None:
        """Number of samples, or None for a grid."""
        return None if self.space.search.name == "grid" else self.space.search.samples

    @property
    def num_trials(self) -> int:
        """Trials of the whole sweep."""
        return self.sampled if self.sampled is not None else len(self.arms) * len(self.space.seeds)

    def resolve(self, arm: Arm, seed: int) -> RunConfig:
        """The whole configuration of one trial."""
        return self.base.override({**changes(arm, self.left_out, self.space.named), "seed": seed}, self.where(arm))

    def where(self, arm: Arm) -> str:
        """What a sentence about an arm begins with."""
        return f"search space {self.name}, arm {arm_label(arm)}"

    def tentative(self, part: Arm) -> dict[str, Json]:
        """All values by dotted name of an arm, or of a part of one, before it is known whether they fit together."""
        return self.base.tentative(changes(part, self.left_out, self.space.named))

    def trial(self, number: int, arm: Arm, seed: int, start: Start | None = None) -> TrialPlan:
        """A trial under a key of its content, its start included; samples may repeat: their number is part of it."""
        resolved = self.resolve(arm, seed)
        config: dict[str, Any] = resolved.model_dump(mode="json")
        digests = content_digests(resolved)
        content = [config, self.engine_digest, digests, number if self.sampled is not None else None]
        content += [start.model_dump()] if start is not None else []
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        return TrialPlan(
            key=key,
            number=number,
            arm=arm,
            seed=seed,
            config=config,
            digests=digests,
            marks=resolved.marks(),
            start=start,
        )

    def grid(self) -> list[TrialPlan]:
        """All trials of a grid, seed by seed, so that a stopped sweep is balanced.

        Where trials are pruned, the arms of a seed are shuffled: successive halving never prunes an ascending order.
        """
        trials: list[TrialPlan] = []
        for seed in self.space.seeds:
            arms = self.arms
            if self.space.scheduler.name in ("asha", "median"):
                arms = [arms[i] for i in stream(seed, "arm order").permutation(len(arms))]
            for arm in arms:
                trials.append(self.trial(len(trials), arm, seed))
        return trials

    def digests(self) -> dict[str, str]:
        """What must be the same for a sweep to be gone on with."""
        definition = json.dumps(
            [
                self.space.model_dump(mode="json", exclude={"resources", "reference", "columns"}),
                self.base.model_dump(mode="json"),
            ],
            sort_keys=True,
        )
        content = sorted({json.dumps(content_digests(config), sort_keys=True) for config in self.reachable()})
        return {
            "definition": hashlib.sha256(definition.encode()).hexdigest(),
            "engine": self.engine_digest,
            "data": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            "packages": ", ".join(f"{name} {metadata.version(name)}" for name in ENGINE_PACKAGES),
        }
