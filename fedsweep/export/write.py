"""Export of a trial's checkpoint: check, build the model, write, load again and compare."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fedsweep.common.errors import UserError, near, one_line
from fedsweep.export.card import ExportCard
from fedsweep.export.contents import write
from fedsweep.export.predict import load
from fedsweep.export.which_trial import Named, summarise_list
from fedsweep.federation.build_and_run import build, content_digests
from fedsweep.federation.rounds import Federation
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import ExportObstacle, SeparateModels, adapter_of, predicted
from fedsweep.results.checkpoint import Checkpoint
from fedsweep.results.checkpoint import load as load_checkpoint
from fedsweep.results.records import TrialPlan
from fedsweep.types import ImageSet

COMPARED = 8  # test images whose logits are compared with the run's own evaluation
TOLERANCE = 1e-4  # allowed difference relative to the largest logit, for a different order of summation


def export(named: Named, target: Path, client: str | None = None) -> ExportCard:
    """Write a trial's global model, or a client's own, into a new or empty folder.

    Raises:
        UserError: The folder cannot be used, the method's model cannot be exported, the run's data or weights are
            missing or changed, or the written model gives different logits from the run.
    """
    check_target(target)
    plan = named.record.plan
    config = RunConfig.of(plan.config, f"trial {plan.key}")
    check_exportable(config, client)
    check_content(config, plan)
    federation = build(config)
    checkpoint = load_checkpoint(named.trial.checkpoint, federation.initial_state())
    if not federation.model.movable():
        raise UserError(f"`method` {config.method.name} trains nothing, so that there is nothing to export.")
    test = federation.domains[0].test
    images = test.select(torch.arange(min(COMPARED, len(test))))
    expected = _logits(federation, checkpoint, images, client)
    with _as_a_whole(target) as folder:
        layers, last = checkpoint.state.layers, checkpoint.history[-1]
        card = write(folder, named, config, federation.model, layers, last, client)
        found = load(folder).logits(images.take(torch.arange(len(images)))[0])
        furthest = (found - expected).abs().max().item()
        if not furthest <= TOLERANCE * (1 + expected.abs().max().item()):
            raise UserError(
                f"trial {plan.key} cannot be exported: read from its files the model gives other logits than the run's "
                f"own evaluation, by up to {furthest:.3g}."
            )
    return card


def _logits(federation: Federation, checkpoint: Checkpoint, images: ImageSet, client: str | None) -> Tensor:
    """Return logits as in evaluation, after loading the global or the client's adapter into the resident model."""
    method, state = federation.method, checkpoint.state
    federation.model.load_adapter(adapter_of(method, state, client))
    owner = next((one for one in federation.clients if one.id == client), None)
    return predicted(method, state, federation.trainer.reader, images, owner)


@contextlib.contextmanager
def _as_a_whole(target: Path) -> Iterator[Path]:
    """Yield a scratch folder that is renamed to `target` at the end, or removed on an error."""
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        scratch.chmod(0o755)  # mkdtemp creates it private
        yield scratch
        for path in scratch.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors creates files private too
        scratch.rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or one_line(error)}.") from None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def check_target(target: Path) -> None:
    """Raise UserError if `target` is not empty or cannot be created."""
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"`--to` must be a new or an empty folder, but {target} is not empty.")
    if target.exists() and not target.is_dir():
        raise UserError(f"`--to` must be a new or an empty folder, but {target} is a file.")
    above = next(one for one in target.absolute().parents if one.exists())
    if not above.is_dir():
        raise UserError(f"`--to` must be a new or an empty folder, but {above} in {target} is a file.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"`--to` {target} cannot be made: {above} cannot be written.")


def check_exportable(config: RunConfig, client: str | None = None) -> None:
    """Raise UserError if the client has no own model, or the model predicts with more than an export can contain."""
    method, clients = config.method, list(config.client_domains())
    if client is not None and client not in clients:
        hint = near(client, clients) or f"; there are {summarise_list(clients)}."
        raise UserError(f"`--client`: there is no client `{client}`{hint}")
    separate = isinstance(method, SeparateModels)
    obstacle = ExportObstacle.of_method(method).export_obstacle(
        config.depths(), config.backbone.depth, client is not None
    )
    if obstacle is not None:
        whose = "the global model" if client is None else f"client {client}"
        own = "" if client is not None or not separate else "; `--client` exports a client's own model"
        raise UserError(
            f"`method` {method.name} cannot be exported: {whose} predicts with {obstacle}, for which neither PEFT nor "
            f"the backbone's own library has a place{own}."
        )
    if client is not None and not separate:
        raise UserError(
            f"`--client` is for methods whose clients have models of their own, but those of `method` {method.name} "
            "share one."
        )


def check_content(config: RunConfig, plan: TrialPlan) -> None:
    """Raise UserError if the run's data or weights are missing, or changed since."""
    for name, found in content_digests(config).items():
        if plan.digests.get(name, found) != found:
            raise UserError(f"the {name} of trial {plan.key} changed since it ran; it cannot be exported.")
