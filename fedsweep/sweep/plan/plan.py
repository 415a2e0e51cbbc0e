"""Plan of a sweep: the checked arms of a search space, and its trials. No Ray."""

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
    """A search space with checked arms, and its trials; the key of a trial is a digest of its content."""

    def __init__(self, request: RequestedSpace, base: RunConfig) -> None:
        super().__init__(request, base)
        self.files = {name: path.read_text() for name, path in request.files.items()}
        self.engine_digest = engine_digest()
        self._digests: dict[str, dict[str, str]] = {}

    @classmethod
    def read(cls, name: str, overrides: Mapping[str, Json], options: Mapping[str, Json]) -> "Plan":
        """Read a search space and return its plan; raise UserError if the space or anything in it is invalid."""
        return cls.of(read(name, overrides, options))

    @classmethod
    def of(cls, request: RequestedSpace) -> "Plan":
        """Resolve the requested space over its experiment; raise UserError if the experiment or an arm is invalid."""
        experiment = RunConfig.of(read_yaml(request.files["experiment.yaml"]), f"experiment {request.space.experiment}")
        base = experiment.override(request.space.fixed, request.where) if request.space.fixed else experiment
        plan = cls(request, base)
        check(plan)
        return plan

    @property
    def reference(self) -> Reference | None:
        """The paper's values, or None if the user chose data that lacks its domains."""
        if (paper := self.space.reference) is None:
            return None
        of_domains = {name for name in paper.metrics() if name.startswith(OF_DOMAINS)}
        for _, config in self.configs if of_domains else []:
            of_domains -= {*config.metrics()}
        return None if of_domains else paper

    def preflight(self) -> None:
        """Raise UserError if a trial's data or weights are missing or do not fit, or clients cannot share the data."""
        seen: set[str] = set()
        for config in self.reachable():
            load(config.data)  # first, so that missing data is reported before missing weights
            content = _content(config, "partition", "federation", "seed", "evaluation")
            if content not in seen:
                seen.add(content)
                check_content(config)

    def content_digests(self, config: RunConfig) -> dict[str, str]:
        """Return the digests of a trial's images and weights, computed once for equal content."""
        if (content := _content(config)) not in self._digests:
            self._digests[content] = content_digests(config)
        return self._digests[content]

    def grid(self) -> list[TrialPlan]:
        """Return the trials of a grid, ordered by seed, so that an interrupted sweep is balanced over the arms."""
        trials: list[TrialPlan] = []
        for seed in self.space.seeds:
            arms = self.arms
            if self.space.scheduler.name in ("asha", "median"):  # in ascending order, halving would prune nothing
                arms = [arms[i] for i in stream(seed, "arm order").permutation(len(arms))]
            trials += [self.trial(number, arm, seed) for number, arm in enumerate(arms, len(trials))]
        return trials

    def trial(self, number: int, arm: Arm, seed: int, start: Start | None = None) -> TrialPlan:
        """Return a trial; its key depends on its content, its start and, because samples repeat, a sample's number."""
        resolved = self.resolve(arm, seed)
        config: dict[str, Any] = resolved.model_dump(mode="json")
        digests = self.content_digests(resolved)
        content = [config, self.engine_digest, digests, number if self.sampled is not None else None]
        content += [start.model_dump()] if start is not None else []
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        marks = resolved.marks()
        return TrialPlan(
            key=key, number=number, arm=arm, seed=seed, config=config, digests=digests, marks=marks, start=start
        )

    def digests(self) -> dict[str, str]:
        """Return the digests and package versions that must be unchanged when a sweep is resumed."""
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
    """Return a text that identifies the content that a run reads, and the fields `others`."""
    fields = config.model_dump_json(include={"data", "backbone", "synthetic", *others})
    return f"{fields} {OwnWeights.of_method(config.method).fingerprint()} {config.trains_on_synthetic}"
