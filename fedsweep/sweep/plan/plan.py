"""Plan of a sweep: the checked arms of a search space, its trials, and the identity of its code. No Ray."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import fedsweep
from fedsweep.common.config import flat
from fedsweep.common.errors import UserError, near
from fedsweep.common.randomness import stream
from fedsweep.common.yaml_values import Json, read_yaml
from fedsweep.data.data_config import load
from fedsweep.federation.build_and_run import check_content, content_digests
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import OwnWeights
from fedsweep.results import Start, TrialPlan
from fedsweep.results.arms import ABLATED, Arm, Reference, agrees, arm_label, counterparts, identity, shown_setting
from fedsweep.results.history import ACCUMULATED
from fedsweep.results.table_columns import check_columns
from fedsweep.sweep.plan.model_counts import COUNTS
from fedsweep.sweep.plan.resolved_space import ResolvedSpace
from fedsweep.sweep.space.axes import Conditions, condition, holds
from fedsweep.sweep.space.requested_space import RequestedSpace, read

OF_DOMAINS = ("accuracy/domain/", "accuracy/out_of_domain")
"""Prefixes of metrics that other data may lack."""


def check(resolved: ResolvedSpace) -> None:
    """Raise UserError unless the search space fits its arms and every arm, or probe of a sampled search, is valid."""
    _check_names(resolved)
    _check_arms_that_are_named(resolved)
    _check_conditions(resolved)
    _check_components(resolved)
    if resolved.space.search.name != "grid":
        resolved.resolve_all(resolved.space.search.first)
    varies_synthetic = any(name.split(".")[0] == "synthetic" for name in resolved.space.names)
    where, seen = resolved.request.where, dict[str, Arm]()
    for arm, config in resolved.configs:
        if varies_synthetic and not config.trains_on_synthetic:
            raise UserError(
                f"{where}: `synthetic` varies, but in the arm {arm_label(arm)} nobody trains on synthetic images."
            )
        content = json.dumps(config.model_dump(mode="json"), sort_keys=True)
        if resolved.sampled is None and content in seen:
            raise UserError(f"{where}: the arms {arm_label(seen[content])} and {arm_label(arm)} are the same run.")
        seen[content] = arm
    _check_metrics(resolved, [(arm, config.metrics()) for arm, config in resolved.configs])


def _check_names(resolved: ResolvedSpace) -> None:
    """Check the names that vary in all arms; `resolve` checks those of conditional axes and named arms."""
    space, known = resolved.space, flat(resolved.base)
    conditional = {key for key, axis in space.space.items() if axis.when}
    own = conditional.union(*(space.named or {}).values())
    for name in (one for one in space.names if one not in own):
        if name not in known and not any(other.startswith(f"{name}.") for other in known):
            hint = near(name, known) or "."
            raise UserError(f"{resolved.request.where}: `{name}` is not a hyperparameter of this run{hint}")


def _check_arms_that_are_named(resolved: ResolvedSpace) -> None:
    """Raise UserError unless `baseline` and `reference` name arms, and the baseline has a counterpart of each arm."""
    if resolved.sampled is not None:
        return
    space, arms, where = resolved.space, resolved.arms, resolved.request.where
    if (baseline := space.baseline) is not None:
        if not any(agrees(baseline, arm) for arm in arms) or (not baseline and arms != [{}]):
            raise UserError(f"{where}: `baseline` must be one of the arms, but {baseline} is not.")
        found = counterparts(arms, baseline)
        for unpaired in (arm for arm in arms if identity(arm) not in found):
            other = next(arm for arm in arms if agrees(baseline, arm))
            absent = next(name for name in other if name not in baseline and name not in unpaired)
            raise UserError(
                f"{where}: the arm {arm_label(unpaired)} has nothing to be compared with, because the "
                f"`baseline` {arm_label(baseline)} leaves `{absent}` open, which that arm lacks."
            )
    known = {identity(arm) for arm in resolved.crossed} if space.reference else set()
    for place, one in enumerate(space.reference.arms if space.reference else ()):
        if identity(one.arm) not in known:
            raise UserError(f"{where}: `reference.arms.{place}.arm` must be one of the arms, but {one.arm} is not.")


def _check_conditions(resolved: ResolvedSpace) -> None:
    """Raise UserError unless each condition holds in some arms but not in all, and some arm has each of its values."""
    axes = resolved.space.space
    conditions = Conditions(axes, resolved.tentative)
    arms = resolved.probes if any(axis.when for axis in axes.values()) else []
    for key, axis in axes.items():
        where = f"{resolved.request.where}: `when` of `space.{key}` asks for"
        for name, values in axis.conditions.items():
            runs = {id(run): run for run in (conditions.run(key, arm) for arm in arms)}.values()
            if not any(name in run for run in runs):
                known = sorted({one for run in runs for one in run})
                inside = f"{name}.name" if f"{name}.name" in known else name  # an object's own name
                hint = near(inside, known) or "."
                raise UserError(f"{where} `{name}`, which is not a hyperparameter of any arm{hint}")
            for value in values:
                if not any(holds(name, [value], run) for run in runs):
                    met = dict.fromkeys(shown_setting(run[name]) for run in runs if name in run)
                    has = axes[name].shown() if name in axes else " or ".join(met)
                    raise UserError(f"{where} {condition(name, [value])}, which no arm has; it is {has}.")
            if all(holds(name, values, run) for run in runs):
                raise UserError(f"{where} {condition(name, values)}, which every arm has; leave it out.")


def _check_components(resolved: ResolvedSpace) -> None:
    seed = resolved.space.seeds[0]
    for full in [arm for arm in resolved.arms if arm.get(ABLATED) == []]:
        whole = resolved.resolve(full, seed)
        for name, value in resolved.left_out.items():
            if resolved.resolve({**full, ABLATED: [name]}, seed) == whole:
                raise UserError(
                    f"{resolved.request.where}: `ablate` leaves `{name}` out by {shown_setting(value)}, "
                    f"which it is already in the arm {arm_label(full)}."
                )


def _check_metrics(resolved: ResolvedSpace, of_arms: list[tuple[Arm, list[str]]]) -> None:
    """Raise UserError if a metric does not exist; the paper's domains may be missing if the user chose other data."""
    space, request, where = resolved.space, resolved.request, resolved.request.where
    metrics = COUNTS if request.counted else list(dict.fromkeys(name for _, reported in of_arms for name in reported))
    asked = [] if request.counted else [("objective.metric", space.objective.metric)]
    if against := space.objective.against:
        asked.append(("objective.against.metric", against.metric))
    for metric in space.reference.metrics() if space.reference else ():
        if not (request.other_data and metric.startswith(OF_DOMAINS)):
            asked.append(("reference", metric))
    for entry, metric in asked:
        known = [*dict.fromkeys([*metrics, *ACCUMULATED])] if entry == "objective.against.metric" else metrics
        if metric not in known:
            hint = near(metric, known) or f"; it reports {', '.join(known)}."
            raise UserError(f"{where}: `{entry}` {metric} is not reported by this run{hint}")
    if request.counted and space.columns:
        raise UserError(f"{where}: `columns` are of trials that are played, and `measure` plays none.")
    check_columns(space.columns, metrics, space.objective.metric, f"{where}: `columns`")
    for entry, metric, arm in [] if request.counted else _missing_in_an_arm(resolved, of_arms):
        raise UserError(f"{where}: `{entry}` {metric} is not reported by the arm {arm_label(arm)}.")


def _missing_in_an_arm(resolved: ResolvedSpace, of_arms: list[tuple[Arm, list[str]]]) -> Iterator[tuple[str, str, Arm]]:
    """Yield each metric that an arm needs but does not report, after the entry that asks for it."""
    objective, paper = resolved.space.objective, resolved.space.reference
    for arm, reported in of_arms:
        if objective.metric not in reported:
            yield "objective.metric", objective.metric, arm
        if objective.against and objective.against.metric not in {*reported, *ACCUMULATED}:
            yield "objective.against.metric", objective.against.metric, arm
        for metric in paper.of_arm(arm) if paper else ():
            if metric not in reported and not (resolved.request.other_data and metric.startswith(OF_DOMAINS)):
                yield "reference", metric, arm


ENGINE = ("common", "data", "models", "training", "methods", "federation")
"""Rooms that decide a run's numbers, together with `types.py`."""
ENGINE_PACKAGES = ("torch", "timm", "transformers", "peft", "numpy", "scikit-learn")


def engine_digest() -> str:
    """Return the SHA-256 of the source and the shipped weights that decide a run's numbers, as hex digits."""
    root = Path(fedsweep.__file__).parent
    kinds = {".py", ".json", ".safetensors"}
    files = [path for room in ENGINE for path in (root / room).rglob("*") if path.suffix in kinds]
    digest = hashlib.sha256()
    for path in sorted([root / "types.py", *files]):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
