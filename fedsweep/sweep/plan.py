"""From a search space to trials: resolved, checked and keyed before anything starts. No ray."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import fedsweep
from fedsweep.arms import WITHOUT, Arm, Reference, arm_label, shown_setting
from fedsweep.config import flat
from fedsweep.data import load
from fedsweep.errors import UserError, near
from fedsweep.experiment import RunConfig
from fedsweep.paths import find
from fedsweep.plain import Json, read_yaml
from fedsweep.play import check_content, content_digests
from fedsweep.seeding import stream
from fedsweep.store import TrialPlan
from fedsweep.sweep.ablation import changes, left_out_values
from fedsweep.sweep.counts import COUNTS
from fedsweep.sweep.space import SearchSpace

OF_DOMAINS = ("accuracy/domain/", "accuracy/out_of_domain")
"""How metrics begin that other data may lack."""
# What decides a run's numbers; the rest of the package may change between the sessions of a sweep.
ENGINE = ("images", "data", "models", "methods")
ENGINE_PACKAGES = ("torch", "timm", "transformers", "peft", "numpy", "scikit-learn")
ENGINE_MODULES = (
    "types",
    "config",
    "plain",
    "seeding",
    "base_optimizer",
    "training",
    "optimizers",
    "frozen",
    "reader",
    "malicious",
    "aggregation",
    "distillation",
    "mutual_learning",
    "evaluation",
    "costs",
    "drift",
    "structural_bias",
    "federation",
    "experiment",
    "play",
    "embedding/tsne",
)


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
        space = space.override({**space_changes, "fixed": {**space.fixed, **changes}}, where)
        experiment = find("experiments", space.experiment, "" if "experiment" in space_changes else where)
        base = RunConfig.of(read_yaml(experiment), f"experiment {space.experiment}")
        base = base.override(space.fixed, where)
        files = {"search_space.yaml": path.read_text(), "experiment.yaml": experiment.read_text()}
        plan = cls(name, space, base, files, {"overrides": dict(changes), "options": dict(space_changes)})
        plan.check()
        return plan

    def check(self) -> None:
        """Resolve every arm (or every extreme of a sampled axis), and find the objective among the metrics."""
        own = {name for changes in (self.space.named or {}).values() for name in changes}  # checked arm by arm
        for name in (one for one in self.space.names if one not in own):
            if name not in (known := flat(self.base)) and not any(other.startswith(f"{name}.") for other in known):
                raise UserError(
                    f"search space {self.name}: `{name}` is not a hyperparameter of this run{near(name, known) or '.'}"
                )
        self._check_components()
        varies_synthetic = any(name.split(".")[0] == "synthetic" for name in self.space.names)
        seen: dict[str, Arm] = {}
        metrics: list[tuple[Arm, list[str]]] = []
        for arm in self._arms():
            config = self.resolve(arm, self.space.seeds[0])
            metrics.append((arm, config.metrics()))
            if varies_synthetic and not config.trains_on_synthetic:
                raise UserError(
                    f"search space {self.name}: `synthetic` varies, but in the arm {arm_label(arm)} nobody trains on "
                    "synthetic images."
                )
            resolved = json.dumps(config.model_dump(mode="json"), sort_keys=True)
            if self.sampled is None and resolved in seen:
                twins = f"{arm_label(seen[resolved])} and {arm_label(arm)}"
                raise UserError(f"search space {self.name}: the arms {twins} are the same run.")
            seen[resolved] = arm
        self._check_metrics(metrics)

    def _check_components(self) -> None:
        """A component that the full method lacks is none that could be left out."""
        seed = self.space.seeds[0]
        for full in [arm for arm in self.space.arms() if arm.get(WITHOUT) == []]:
            whole = self.resolve(full, seed)
            for name, value in self.left_out.items():
                if self.resolve({**full, WITHOUT: [name]}, seed) == whole:
                    raise UserError(
                        f"search space {self.name}: `ablate` leaves `{name}` out by {shown_setting(value)}, "
                        f"which it is already in the arm {arm_label(full)}."
                    )

    def _check_metrics(self, of_arms: list[tuple[Arm, list[str]]]) -> None:
        """Find what is compared among the metrics; a paper's domains may be missing where the user took other data."""
        counted, objective = self.counted, self.space.objective.metric
        metrics = COUNTS if counted else list(dict.fromkeys(name for _, reported in of_arms for name in reported))
        asked = [] if counted else [("objective.metric", objective)]
        for metric in self.space.reference.metrics() if self.space.reference else ():
            if not (self._other_data and metric.startswith(OF_DOMAINS)):
                asked.append(("reference", metric))
        for entry, metric in asked:
            if metric not in metrics:
                raise UserError(
                    f"search space {self.name}: `{entry}` {metric} is not reported by this run"
                    f"{near(metric, metrics) or '; it reports ' + ', '.join(metrics) + '.'}"
                )
        for entry, metric, arm in [] if counted else self._of_other_arms(of_arms):
            raise UserError(
                f"search space {self.name}: `{entry}` {metric} is not reported by the arm {arm_label(arm)}."
            )

    def _of_other_arms(self, of_arms: list[tuple[Arm, list[str]]]) -> Iterator[tuple[str, str, Arm]]:
        """Metrics that some arm reports, but not the one of which they are asked."""
        objective, paper = self.space.objective.metric, self.space.reference
        for arm, reported in of_arms:
            if objective not in reported:
                yield "objective.metric", objective, arm
            for metric in paper.of_arm(arm) if paper else ():
                if metric not in reported and not (self._other_data and metric.startswith(OF_DOMAINS)):
                    yield "reference", metric, arm

    @property
    def reference(self) -> Reference | None:
        """The paper's values, unless the user took data that lacks its domains."""
        if (paper := self.space.reference) is None:
            return None
        of_domains = {name for name in paper.metrics() if name.startswith(OF_DOMAINS)}  # of counts, none is
        seed = self.space.seeds[0]
        for arm in self._arms() if of_domains else []:
            of_domains -= {*self.resolve(arm, seed).metrics()}
        return None if of_domains else paper

    @property
    def _other_data(self) -> bool:
        """Whether the user runs the space on an experiment, or on data, that its file does not name."""
        overrides = self.changes["overrides"]
        return "experiment" in self.changes["options"] or any(name.split(".")[0] == "data" for name in overrides)

    def preflight(self) -> None:
        """Open what the trials read, and divide it as they will, so that nothing is missed once workers run.

        Raises:
            UserError: data or weights are not there, do not fit, or cannot be divided among the clients.
        """
        seen: set[str] = set()
        for config in self._reachable():
            load(config.data)  # what is missing is told in the order in which it is got
            asked = config.model_dump_json(
                include={"data", "partition", "synthetic", "federation", "seed", "backbone", "evaluation"}
            )
            asked += f"{config.method.fingerprint()} {config.trains_on_synthetic}"
            if asked not in seen:
                seen.add(asked)
                check_content(config)

    def _arms(self) -> list[Arm]:
        """Every arm of a grid; of a sampled search the ends of each range."""
        if self.sampled is None:
            return self.space.arms()
        return [{name: value} for name, axis in self.space.space.items() for value in axis.extremes()]

    def _reachable(self) -> Iterator[RunConfig]:
        return (self.resolve(arm, seed) for arm in self._arms() for seed in self.space.seeds)

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
        return self.sampled if self.sampled is not None else len(self.space.arms()) * len(self.space.seeds)

    def resolve(self, arm: Arm, seed: int) -> RunConfig:
        """The whole configuration of one trial."""
        where = f"search space {self.name}, arm {arm_label(arm)}"
        return self.base.override({**changes(arm, self.left_out, self.space.named), "seed": seed}, where)

    def trial(self, number: int, arm: Arm, seed: int) -> TrialPlan:
        """A trial under a key of its content; samples may repeat, so their number is part of it."""
        resolved = self.resolve(arm, seed)
        config: dict[str, Any] = resolved.model_dump(mode="json")
        digests = content_digests(resolved)
        content = [config, self.engine_digest, digests, number if self.sampled is not None else None]
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
        return TrialPlan(
            key=key, number=number, arm=arm, seed=seed, config=config, digests=digests, marks=resolved.marks()
        )

    def grid(self) -> list[TrialPlan]:
        """All trials of a grid, seed by seed, so that a stopped sweep is balanced.

        Where trials are pruned, the arms of a seed are shuffled: successive halving never prunes an ascending order.
        """
        trials: list[TrialPlan] = []
        for seed in self.space.seeds:
            arms = self.space.arms()
            if self.space.scheduler.name != "none":
                arms = [arms[i] for i in stream(seed, "arm order").permutation(len(arms))]
            for arm in arms:
                trials.append(self.trial(len(trials), arm, seed))
        return trials

    def digests(self) -> dict[str, str]:
        """What must be the same for a sweep to be gone on with."""
        definition = json.dumps(
            [self.space.model_dump(mode="json", exclude={"resources", "reference"}), self.base.model_dump(mode="json")],
            sort_keys=True,
        )
        content = sorted({json.dumps(content_digests(config), sort_keys=True) for config in self._reachable()})
        return {
            "definition": hashlib.sha256(definition.encode()).hexdigest(),
            "engine": self.engine_digest,
            "data": hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            "packages": ", ".join(f"{name} {metadata.version(name)}" for name in ENGINE_PACKAGES),
        }


def engine_digest() -> str:
    """A digest of the source and weights that decide a run's numbers."""
    root = Path(fedsweep.__file__).parent
    files = [root / f"{module}.py" for module in ENGINE_MODULES]
    kinds = {".py", ".json", ".safetensors"}
    files += [path for room in ENGINE for path in (root / room).rglob("*") if path.suffix in kinds]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
