"""Measure the size of each term of FedBRICK's losses on digits, for several loss weights and both norms of Eq. 24.

    uv run python benchmarks/brick_loss_terms.py
    uv run python benchmarks/brick_loss_terms.py --rounds 12 --seed 1

The loss of stage I is the cross-entropy plus two penalties with the weights `lambda_w` and `lambda_theta` (Eq. 21). The
loss of stage II is the cross-entropy plus the distillation loss with the weight `lambda_d` (Eq. 24). Each row of the
two Markdown tables belongs to one run of the experiment `fedbrick_digits`. A row shows each weighted term, averaged
over all clients, rounds and local steps, and the share of the added terms in the loss.

All terms come from fedsweep's own losses. A loss is linear in its weights. The value of a term at weight 1 is therefore
the loss in which this weight is 1 and the others are 0, minus the loss in which all weights are 0.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from pydantic import PrivateAttr
from torch import Tensor

from fedsweep.common.errors import DivergenceError
from fedsweep.common.paths import find
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.build_and_run import build
from fedsweep.federation.rounds import federate
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.fedbrick.method import FedBRICK
from fedsweep.models.layered import Images, LayeredModel, Walk
from fedsweep.training.local_training import CohortTrainer, LocalTask
from fedsweep.types import AdapterState, Client, ClientUpdate, LayerAllocation, ServerState

CROSS_ENTROPY = "cross-entropy"
STAGE_ONE: list[dict[str, Any]] = [
    {"lambda_w": 0.001, "lambda_theta": 0.0005},
    {"lambda_w": 0.01, "lambda_theta": 0.005},
    {"lambda_w": 0.1, "lambda_theta": 0.05},
    {"lambda_w": 1.0, "lambda_theta": 0.5},
]
STAGE_TWO: list[dict[str, Any]] = [
    *({"distillation_norm": "mean", "lambda_d": weight} for weight in (0.001, 0.01, 0.1, 1.0)),
    *({"distillation_norm": "sum", "lambda_d": weight} for weight in (1e-5, 0.001, 0.01, 0.1)),
]


class Measured(FedBRICK):
    """FedBRICK, with a record of the weighted terms of each local step's loss in one of the two stages."""

    _steps: list[dict[str, float]] = PrivateAttr(default_factory=list)

    def terms(self) -> dict[str, float]:
        """Return each weighted term, averaged over all recorded steps, keyed by the name of its weight."""
        return {name: mean(step[name] for step in self._steps) for name in self._steps[0]}

    def _one_weight_each(self, *weights: str) -> dict[str, FedBRICK]:
        """Return methods in which one weight is 1 and the others are 0, and one in which all weights are 0."""
        fields = {name: getattr(self, name) for name in FedBRICK.model_fields} | dict.fromkeys(weights, 0.0)
        return {CROSS_ENTROPY: FedBRICK(**fields), **{name: FedBRICK(**fields | {name: 1.0}) for name in weights}}

    def _recorded(self, task: LocalTask, parts: Mapping[str, LocalTask]) -> LocalTask:
        """Return `task` with a loss that also records its weighted terms."""

        def objective(model: LayeredModel, images: Images, labels: Tensor, walk: Walk) -> Tensor:
            with torch.no_grad():
                found = {name: part.objective(model, images, labels, walk).item() for name, part in parts.items()}
            base = found.pop(CROSS_ENTROPY)
            added = {name: getattr(self, name) * (value - base) for name, value in found.items()}
            self._steps.append({CROSS_ENTROPY: base, **added})
            return task.objective(model, images, labels, walk)

        return replace(task, objective=objective)


class MeasuredStageOne(Measured):
    """FedBRICK, with a record of the terms of stage I (Eq. 21)."""

    def _stage_one(
        self, state: ServerState, client: Client, row: LayerAllocation, trainer: CohortTrainer, live: AdapterState
    ) -> LocalTask:
        methods = self._one_weight_each("lambda_w", "lambda_theta")
        parts = {name: one._stage_one(state, client, row, trainer, live) for name, one in methods.items()}
        return self._recorded(super()._stage_one(state, client, row, trainer, live), parts)


class MeasuredStageTwo(Measured):
    """FedBRICK, with a record of the terms of stage II (Eq. 24)."""

    def _stage_two(self, task: LocalTask, update: ClientUpdate, trainer: CohortTrainer) -> LocalTask:
        parts = {name: one._stage_two(task, update, trainer) for name, one in self._one_weight_each("lambda_d").items()}
        return self._recorded(super()._stage_two(task, update, trainer), parts)


def measure(stage: type[Measured], settings: Mapping[str, Any], rounds: int, seed: int) -> dict[str, float] | None:
    """Run `fedbrick_digits` with some settings of the method, and return the mean of each weighted term of a stage.

    Return None if the run diverges.
    """
    experiment = RunConfig.of(read_yaml(find("experiments", "fedbrick_digits")), "fedbrick_digits")
    changes = {f"method.{name}": value for name, value in settings.items()}
    config = experiment.override({**changes, "federation.rounds": rounds, "seed": seed}, "benchmark")
    method = stage(**{name: getattr(config.method, name) for name in FedBRICK.model_fields})
    try:
        for _ in federate(replace(build(config), method=method)):
            pass
    except DivergenceError:
        return None
    return method.terms()


def row(settings: Mapping[str, Any], terms: Mapping[str, float] | None) -> str:
    """Return a line of a Markdown table: the settings, each weighted term, and the share of the added terms."""
    cells = [str(value) for value in settings.values()]
    if terms is None:
        return f"| {' | '.join([*cells, 'diverged'])} |"
    share = 1 - terms[CROSS_ENTROPY] / sum(terms.values())
    return f"| {' | '.join([*cells, *(f'{value:.3g}' for value in terms.values()), f'{100 * share:.2g} %'])} |"


def main() -> None:
    """Run all settings, and print a Markdown table for each stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", type=int, help="measure only this many settings of each stage")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for stage, all_settings in ((MeasuredStageOne, STAGE_ONE), (MeasuredStageTwo, STAGE_TWO)):
        added = [name for name in all_settings[0] if name.startswith("lambda_")]
        columns = [*all_settings[0], CROSS_ENTROPY, *(f"term of {name}" for name in added), "share of added terms"]
        print(f"| {' | '.join(columns)} |\n|{' ---: |' * len(columns)}")
        for settings in all_settings[: asked.settings]:
            print(row(settings, measure(stage, settings, asked.rounds, asked.seed)), flush=True)
        print()


if __name__ == "__main__":
    main()
