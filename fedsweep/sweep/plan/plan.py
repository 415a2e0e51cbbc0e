"""The plan of a sweep: its checked arms, its trials, and digests of its code, data and weights.

This module does not import ray.
"""

import hashlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import numpy as np

import fedsweep
from fedsweep.common.code_digest import code_files, digest
from fedsweep.common.randomness import stream
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.data.data_config import load
from fedsweep.federation.build_and_run import check_content, content_digests
from fedsweep.federation.derived_values import derived_values
from fedsweep.federation.run_config import RunConfig
from fedsweep.federation.simulated_time import check_devices
from fedsweep.methods.capabilities import OwnWeights
from fedsweep.results import Start, TrialPlan
from fedsweep.results.arms import Arm, Reference, identity
from fedsweep.results.records import IN_DOMAIN_TEST, PLUGINS
from fedsweep.results.unnamed_changes import ResolvedArm, unnamed_changes
from fedsweep.sweep.plan.checks import check
from fedsweep.sweep.plan.metric_checks import OF_DOMAINS
from fedsweep.sweep.plan.resolved_space import ResolvedSpace
from fedsweep.sweep.plan.space_checks import valid_changes
from fedsweep.sweep.space.requested_space import RequestedSpace, read

ENGINE = ("common", "data", "models", "training", "methods", "federation")
"""Packages of fedsweep whose code affects the metrics of a run, besides the module `types.py`."""
ENGINE_PACKAGES = ("torch", "timm", "transformers", "peft", "numpy", "scikit-learn")


def engine_digest() -> str:
    """Return the SHA-256 (hex digits) of the code that affects the metrics of a run.

    The weights that ship with fedsweep count as code.
    """
    root = Path(fedsweep.__file__).parent
    files: dict[PurePath, Path] = {PurePath("types.py"): root / "types.py"}
    for room in ENGINE:
        files |= code_files(root / room, root)
    return digest(files)


class Plan(ResolvedSpace):
    """The checked arms of a search space, and the trials of its sweep.

    Each trial is identified by its key, a digest of its configuration, code, data and weights.
    """

    def __init__(self, request: RequestedSpace, base: RunConfig) -> None:
        super().__init__(request, base)
        self.files = {name: path.read_text() for name, path in request.files.items()}
        self.engine_digest = engine_digest()
        self._digests: dict[str, dict[str, str]] = {}
        self._tested: dict[str, tuple[dict[str, int], float]] = {}

    @classmethod
    def read(cls, name: str, overrides: Mapping[str, Json], options: Mapping[str, Json]) -> "Plan":
        """Read a search space, apply the user's changes, and return its plan.

        Args:
            name: The name of the search space.
            overrides: The user's changes to the experiment, by dotted name.
            options: The user's changes to the settings of the search space, by dotted name.

        Raises:
            UserError: The search space, its experiment or a change is invalid.
        """
        return cls.of(read(name, overrides, options))

    @classmethod
    def of(cls, request: RequestedSpace) -> "Plan":
        """Return the plan of a requested search space; raise UserError if its experiment or an arm is invalid."""
        file = request.files["experiment.yaml"]
        experiment = RunConfig.of(read_yaml(file), f"experiment {request.space.experiment}", file=file)
        base, rejected = valid_changes(experiment, request.space.fixed)
        plan = cls(request, base)
        check(plan, rejected)
        return plan

    @property
    def reference(self) -> Reference | None:
        """The values from the reference paper, or None.

        The value is None if the search space names no paper, or if the sweep does not report the metrics of the paper's
        domains because the user chose other data.
        """
        paper = self.space.reference
        of_domains = {name for name in (paper.metrics() if paper else ()) if name.startswith(OF_DOMAINS)}
        reported = {name for _, config in self.configs for name in config.metrics()} if of_domains else set()
        return paper if of_domains <= reported else None

    def unnamed_changes(self) -> list[str]:
        """Return one clause for each setting or derived value that arms change without naming it."""
        stage = self.request.stage
        return unnamed_changes(
            [
                ResolvedArm(stage.named(arm, values) if stage is not None else arm, values, derived_values(config))
                for arm, config in self.configs
                for values in [config.model_dump(mode="json")]
            ]
        )

    def preflight(self) -> None:
        """Raise UserError if a trial's data or weights are missing or unsuitable.

        Data are unsuitable, for example, if they cannot be divided among the clients. Also raise UserError if a trial
        has devices, but the FLOPs of its clients cannot be counted.
        """
        seen: set[str] = set()
        for config in self.reachable():
            load(config.data)  # first, so that missing data is reported before missing weights
            content = _content(config, "partition", "federation", "seed", "evaluation")
            if content not in seen:
                seen.add(content)
                check_content(config)
            check_devices(config)  # the method and other hyperparameters decide whether its FLOPs are known

    def content_digests(self, config: RunConfig) -> dict[str, str]:
        """Return the digests of a run's images and weights. Files that several runs share are read only once."""
        if (content := _content(config)) not in self._digests:
            self._digests[content] = content_digests(config)
        return self._digests[content]

    def images_and_chance(self, config: RunConfig) -> tuple[dict[str, int], float]:
        """Return the numbers of images of a run's data set, and the accuracy of chance.

        The numbers of images are keyed by `train`, `test`, `in_domain_test` and, if there are any, `validation`.
        Training images are the images that are divided among the clients and the server. Test images include those of
        held-out domains, except for `in_domain_test`. The accuracy of chance is the largest accuracy of a constant
        prediction on the test images, averaged over the domains of the clients.
        """
        if (content := config.data.model_dump_json()) not in self._tested:
            data = load(config.data)
            validation = sum(len(one.validation) for one in data.domains if one.validation is not None)
            counts = {
                "train": sum(len(one.train) for one in data.domains),
                **({"validation": validation} if validation else {}),
                "test": sum(len(one.test) for one in (*data.domains, *data.held_out)),
                IN_DOMAIN_TEST: sum(len(one.test) for one in data.domains),
            }
            classes = len(data.class_names)
            tests = [one.test for one in data.domains if len(one.test)]
            shares = [np.bincount(test.labels, minlength=classes) / len(test) for test in tests]
            self._tested[content] = counts, float(np.mean(shares, axis=0).max())
        return self._tested[content]

    def grid(self) -> list[TrialPlan]:
        """Return the trials of a grid, sorted by seed.

        Because of this order, all arms have run with about the same number of seeds if the sweep is interrupted.
        """
        trials: list[TrialPlan] = []
        for seed in self.space.planned_seeds:
            arms = self.arms
            if self.space.scheduler.name in ("asha", "asha_async", "median"):
                # Shuffled, because nothing would be pruned if each arm were better than the arms before it.
                arms = [arms[i] for i in stream(seed, "arm order").permutation(len(arms))]
            trials += [self.trial(number, arm, seed) for number, arm in enumerate(arms, len(trials))]
        return trials

    def trial(self, number: int, arm: Arm, seed: int, start: Start | None = None) -> TrialPlan:
        """Return the plan of the trial at position `number` in the sweep.

        The trial's key is a digest of its configuration, code, data and weights. If the trial continues another trial,
        the digest includes `start`. In a sampled search, the digest includes `number`, because two samples can be
        equal.
        """
        resolved = self.resolve(arm, seed)
        config: dict[str, Any] = resolved.model_dump(mode="json")
        digests = self.content_digests(resolved)
        content = [config, self.engine_digest, digests, number if self.sampled is not None else None]
        content += [start.model_dump()] if start is not None else []
        key, marks = _sha256(content)[:16], resolved.marks()
        images, chance = self.images_and_chance(resolved)
        return TrialPlan(
            key=key,
            number=number,
            arm=arm,
            seed=seed,
            config=config,
            digests=digests,
            marks=marks,
            derived=derived_values(resolved),
            images=images,
            chance=chance,
            start=start,
        )

    def _staged(self) -> list[Json]:
        return [self.request.stage.model_dump(mode="json")] if self.request.stage is not None else []

    def digests(self) -> dict[str, str]:
        """Return digests of the sweep's definition, code and data, and the versions of packages and plug-ins.

        A sweep can be resumed only if all of these are unchanged.
        """
        optional = ("comparisons", "tune_each", "exclude")
        entries = {name: getattr(self.space, name) for name in optional}
        absent = {name for name, value in entries.items() if not value}  # as in the digests of older versions
        space = self.space.model_dump(mode="json", exclude={"resources", "reference", "columns", *absent})
        reachable = list(self.reachable())
        content = sorted({identity(self.content_digests(one)) for one in reachable})
        used = {f"{name} {version}" for one in reachable for name, version in one.plugin_versions().items()}
        return {
            "definition": _sha256([space, self.base.model_dump(mode="json"), *self._staged()]),
            "engine": self.engine_digest,
            "data": _sha256(content),
            "packages": ", ".join(f"{name} {metadata.version(name)}" for name in ENGINE_PACKAGES),
            **({PLUGINS: ", ".join(sorted(used))} if used else {}),
        }


def _sha256(values: Json) -> str:
    return hashlib.sha256(identity(values).encode()).hexdigest()


def _content(config: RunConfig, *others: str) -> str:
    """Return a string that identifies a run's images, weights and plug-ins, and the fields in `others`."""
    fields = config.model_dump_json(include={"data", "backbone", "synthetic", *others})
    own = f"{OwnWeights.of_method(config.method).fingerprint()} {config.plugin_versions()}"
    return f"{fields} {own} {config.trains_on_synthetic}"
