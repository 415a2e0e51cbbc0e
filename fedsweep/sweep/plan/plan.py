"""From a requested search space to keyed trials: resolve, check, key. No Ray."""

import hashlib
import json
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from fedsweep.common.randomness import stream
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.data.data_config import load
from fedsweep.federation.build_and_run import check_content, content_digests
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import OwnWeights
from fedsweep.results import Start, TrialPlan
from fedsweep.results.arms import Arm, Reference
from fedsweep.sweep.plan.checks import OF_DOMAINS, check
from fedsweep.sweep.plan.code_identity import ENGINE_PACKAGES, engine_digest
from fedsweep.sweep.plan.resolved_space import ResolvedSpace
from fedsweep.sweep.space.requested_space import RequestedSpace, read


class Plan(ResolvedSpace):
    """A search space whose arms are all checked, and its trials, each under a key of its content."""

    def __init__(self, request: RequestedSpace, base: RunConfig) -> None:
        super().__init__(request, base)
        self.files = {name: path.read_text() for name, path in request.files.items()}
        self.engine_digest = engine_digest()
        self._digests: dict[str, dict[str, str]] = {}

    @classmethod
    def read(cls, name: str, overrides: Mapping[str, Json], options: Mapping[str, Json]) -> "Plan":
        """Read a search space, and return its plan.

        Raises:
            UserError: anything is wrong with the search space, its experiment or the changes to either.
        """
        return cls.of(read(name, overrides, options))

    @classmethod
    def of(cls, request: RequestedSpace) -> "Plan":
        """Resolve the requested space over its experiment, and check every arm.

        Raises:
            UserError: the experiment is not valid, or an arm is not.
        """
        experiment = RunConfig.of(read_yaml(request.files["experiment.yaml"]), f"experiment {request.space.experiment}")
        base = experiment.override(request.space.fixed, request.where) if request.space.fixed else experiment
        plan = cls(request, base)
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

    def preflight(self) -> None:
        """Open the data and weights of all trials, and divide the data, before any worker starts.

        Raises:
            UserError: data or weights are missing, do not fit, or cannot be divided among the clients.
        """
        seen: set[str] = set()
        for config in self.reachable():
            load(config.data)  # before the fingerprint of the weights: what is made first is missed first
            content = _content(config, "partition", "federation", "seed", "evaluation")
            if content not in seen:
                seen.add(content)
                check_content(config)

    def content_digests(self, config: RunConfig) -> dict[str, str]:
        """Return the digests of a trial's images and weights, computed once for all trials that read the same."""
        if (content := _content(config)) not in self._digests:
            self._digests[content] = content_digests(config)
        return self._digests[content]

    def grid(self) -> list[TrialPlan]:
        """Return all trials of a grid, ordered by seed, so that a stopped sweep is balanced over the arms.

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

    def trial(self, number: int, arm: Arm, seed: int, start: Start | None = None) -> TrialPlan:
        """Return a trial under a key of its content, including its start; samples repeat, so their number counts."""
        resolved = self.resolve(arm, seed)
        config: dict[str, Any] = resolved.model_dump(mode="json")
        digests = self.content_digests(resolved)
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

    def digests(self) -> dict[str, str]:
        """Return the digests and versions that a sweep must still have when it is resumed."""
        definition = json.dumps(
            [
                self.space.model_dump(mode="json", exclude={"resources", "reference", "columns"}),
                self.base.model_dump(mode="json"),
            ],
            sort_keys=True,
        )
        content = sorted({json.dumps(self.content_digests(one), sort_keys=True) for one in self.reachable()})
        return {
            "definition": hashlib.sha256(definition.encode()).hexdigest(),
            "engine": self.engine_digest,
            "data": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            "packages": ", ".join(f"{name} {metadata.version(name)}" for name in ENGINE_PACKAGES),
        }


def _content(config: RunConfig, *others: str) -> str:
    """Return what a run reads, as far as its configuration says, together with `others` of its fields."""
    fields = config.model_dump_json(include={"data", "backbone", "synthetic", *others})
    return f"{fields} {OwnWeights.of_method(config.method).fingerprint()} {config.trains_on_synthetic}"
