"""Compute how long the papers' search spaces take on a GPU, from measured images per second.

    uv run python -m benchmarks.paper_times
    uv run python -m benchmarks.paper_times --train 20000 --test 8500

No trial is run. The methods draw the cohorts and blocks of each round as in a run, `local` gives the steps of each
client, and the seconds of a step come from `benchmarks/results/gpu_h100.json`. The numbers of images are not part of
the repository, so the same number is assumed for each domain. Times are proportional to it.

The measured training had batches of 32 images, 10 classes and no dropout. Training therefore has two times: one at the
measured speed, and one at the speed of a large matrix product, which no batch size exceeds. A client that holds b of 12
blocks counts as b / 12 of a client with all blocks, and so does an evaluation with b blocks. Reading images from disk
is not included. `docs/guides/papers.md` contains the output.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fedsweep.common.randomness import stream
from fedsweep.federation.derived_values import derived_values
from fedsweep.federation.rounds import Federation
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.base import Server
from fedsweep.results.unnamed_changes import TRAINED_SHARE
from fedsweep.sweep.plan.plan import Plan
from fedsweep.types import Client, ImageSet

RESULTS = Path(__file__).parent / "results" / "gpu_h100.json"
SPACES = Path(__file__).parents[1] / "search_spaces"
MEASURED = "ViT-B/16, 224 px"
SETS = ("domainnet", "nico", "office_home", "imageclef", "eurosat", "food101", "ucf101")
PLAIN = ("all_large", "all_small", "inclusivefl", "fedra")
"""The methods whose clients train nothing but their blocks, LoRA and head, as in the measured loop."""
PAPERS = {"fedag": "FedAG", "fedbrick": "FedBRICK", "fedms": "FedMS", "fedra": "FedRA"}
TRAIN, TEST = 10_000, 4_000
Range = tuple[float, float]


@dataclass(frozen=True)
class Speed:
    """Seconds per image with all blocks: of training, at best and as measured, and of evaluation."""

    training: Range
    testing: float


@dataclass(frozen=True)
class Work:
    """The work of a trial, as numbers of images that pass through all blocks."""

    trained: float
    tested: float


def speeds(known: Mapping[str, Any]) -> dict[str, Speed]:
    """Return the measured speed of ViT-B/16 for each precision."""
    rows = {(one["phase"], one["precision"]): one for one in known["throughput"] if one["model"] == MEASURED}
    found = {}
    for precision in {precision for _, precision in rows}:
        train, test = rows["train", precision], rows["test", precision]
        best = train["gflop_per_image"] / (train["peak_tflops"] * 1000)
        seconds = [1 / one["images_per_second_fedsweep"] for one in (train, test)]
        found[precision] = Speed((best, seconds[0]), seconds[1])
    return found


def obstacle(config: RunConfig) -> str | None:
    """Return the reason why the measured figures do not fit a run, or None if they fit."""
    backbone = config.backbone
    model = str(getattr(backbone, "model", backbone.name)).split("/")[-1].split(".")[0]
    if model != "vit_base_patch16_224":
        return f"backbone `{model}`"
    if config.method.name not in PLAIN:
        return f"method `{config.method.name}`"
    if config.base_optimizer.name != "fedavg":
        return f"base optimizer `{config.base_optimizer.name}`"
    if config.lora.patch_embed:
        return "`lora.patch_embed`"
    if config.lora.position != "both":
        return f"`lora.position` {config.lora.position}"
    return "drift and bias" if config.evaluation.metrics else None


def clients_of(config: RunConfig, train: int) -> list[Client]:
    """Return the clients of a run without images, each with an equal share of the `train` images of its domain."""
    domains, capacities = config.client_domains(), config.capacities()
    kept = int(train * derived_values(config)[TRAINED_SHARE])
    alike = [*domains.values()]
    found = []
    for client, domain in domains.items():
        count = kept // alike.count(domain)
        images = ImageSet(torch.empty((count, 3, 0, 0), dtype=torch.uint8), torch.zeros(count, dtype=torch.int64))
        found.append(Client(client, domain, images, capacities[client]))
    return found


def work(config: RunConfig, train: int, test: int) -> Work:
    """Count the images of a trial with the cohorts, allocations and steps of a run.

    Args:
        config: The configuration of the run.
        train: The number of training images of each domain.
        test: The number of test images of each domain.
    """
    layers, clients = config.backbone.depth, clients_of(config, train)
    model: Any = SimpleNamespace(num_layers=layers, adapter=dict)
    server = Server(layers, config.aggregation, tuple(sorted(config.depths())))
    state = config.method.init(model, clients, server)
    run: Any = SimpleNamespace(clients=clients, seed=config.seed, config=config.federation, model=model, compared=())
    run._chosen = lambda round: Federation._chosen(run, round)
    run._drawn = lambda *given: Federation._drawn(run, *given)
    fewest, rounds, passes = min(len(one.train) for one in clients), config.federation.rounds, 0
    for round in range(1, rounds + 1):
        cohort = Federation.cohort(run, round)
        rows = config.method.allocate(state, cohort, server, stream(config.seed, "allocation", round))
        for one in cohort:
            steps = config.local.steps_for(len(one.train), fewest)
            passes += steps * config.local.batch_size * len(rows[one.id].held)
    evaluated = sum(Federation.evaluates(run, round) for round in range(rounds + 1))
    domains = len(config.data.training_domains) + len(config.data.held_out_domains)
    return Work(passes / layers, evaluated * domains * test * len(state.layers) / layers)


def hours(seconds: Sequence[float]) -> str:
    """Return the range of some durations in hours.

    >>> hours([3600, 9000]), hours([3600, 3610])
    ('1.0 to 2.5', '1.0')
    """
    low, high = (f"{value / 3600:.1f}" for value in (min(seconds), max(seconds)))
    return low if low == high else f"{low} to {high}"


def spaces() -> Iterator[str]:
    """Yield the names of the papers' search spaces that train on a GPU."""
    for path in sorted((SPACES / "papers").rglob("*.yaml")):
        name = path.relative_to(SPACES).with_suffix("").as_posix()
        if not name.endswith(("_digits", "_pacs", "_usps")) and "\nmeasure:" not in path.read_text():
            yield name


def row(name: str, known: Mapping[str, Speed], train: int, test: int) -> tuple[str, ...]:
    """Return the numbers of a search space, and the reasons why some of its arms have none."""
    plan = Plan.read(name, {}, {})
    training: list[Range] = []
    testing: list[float] = []
    missing: dict[str, None] = {}
    for arm in plan.arms:
        config = plan.resolve(arm, plan.space.planned_seeds[0])
        if reason := obstacle(config):
            missing[reason] = None
            continue
        speed, done = known[config.precision], work(config, train, test)
        training.append((done.trained * speed.training[0], done.trained * speed.training[1]))
        testing.append(done.tested * speed.testing)
    reasons = ", ".join(missing) or "-"
    if not training:
        return *["-"] * 4, reasons
    seeds = plan.num_trials // len(plan.arms)
    whole = [seeds * (sum(one[end] for one in training) + sum(testing)) for end in (0, 1)]
    of_a_trial = hours([value for one in training for value in one]), hours(testing)
    return f"{seeds * len(training)} of {plan.num_trials}", *of_a_trial, hours(whole), reasons


def braced(names: Sequence[str]) -> str:
    """Return names in the notation of a shell, in which names with the same beginning share it.

    >>> braced(["fig4_nico", "table1_nico", "table1_domainnet"])
    '`fig4_nico` `table1_{nico,domainnet}`'
    """
    ends: dict[str, list[str]] = {}
    for name in names:
        end = next((one for one in SETS if name.endswith(f"_{one}")), "")
        ends.setdefault(name.removesuffix(end), []).append(end)
    shown = [f"{start}{{{','.join(found)}}}" if len(found) > 1 else start + found[0] for start, found in ends.items()]
    return " ".join(f"`{one}`" for one in shown)


def page(train: int = TRAIN, test: int = TEST) -> Iterator[str]:
    """Yield the lines of a sentence and a Markdown table. Search spaces with the same numbers share a row."""
    measured = json.loads(RESULTS.read_text())
    known = speeds(measured)
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in spaces():
        _, paper, short = name.split("/")
        rows.setdefault((PAPERS[paper], *row(name, known, train, test)), []).append(short)
    yield f"Hours computed from measured step times on an H100 of {measured['date']}; not run in full:"
    yield ""
    heads = ("paper", "search spaces", "trials", "training of a trial", "evaluation of a trial", "all these trials")
    yield f"| {' | '.join((*heads, 'not measured'))} |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | --- |"
    for (paper, *cells), names in rows.items():
        yield f"| {paper} | {braced(names)} | {' | '.join(cells)} |"
    plain, fast = known["float32"], known["tf32"]
    times = plain.training[1] / fast.training[1], plain.testing / fast.testing
    yield ""
    yield f"With `precision=tf32`, training was {times[0]:.1f} times as fast, and evaluation {times[1]:.1f} times."


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=TRAIN, help="training images of each domain")
    parser.add_argument("--test", type=int, default=TEST, help="test images of each domain")
    given = parser.parse_args()
    print(*page(given.train, given.test), sep="\n")


if __name__ == "__main__":
    main()
