"""From a trial's checkpoint to an export: built as the run was, taken apart, written, loaded again and compared."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fedsweep.common.errors import UserError, one_line
from fedsweep.export.card import ExportCard
from fedsweep.export.contents import write
from fedsweep.export.exportable import check_content, check_exportable, check_target
from fedsweep.export.load import load
from fedsweep.export.which_trial import Named
from fedsweep.federation.rounds import Federation
from fedsweep.federation.run import build
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import adapter_of, predicted
from fedsweep.results.checkpoint import Checkpoint
from fedsweep.results.checkpoint import load as load_checkpoint
from fedsweep.types import ImageSet

COMPARED = 8
"""Test images whose logits must be those of the run's own evaluation."""
TOLERANCE = 1e-4
"""Of the largest logit: the same arithmetic in another order."""


def export(named: Named, target: Path, client: str | None = None) -> ExportCard:
    """Write a trial's global model, or a client's own, into a folder that is new or empty.

    Raises:
        UserError: the folder is taken or cannot be written, the method's model is no such thing, images or weights of
            the run are missing or others by now, or what was written gives other logits than the run.
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
    images = _some_images(federation)
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


def _some_images(federation: Federation) -> ImageSet:
    test = federation.domains[0].test
    return test.select(torch.arange(min(COMPARED, len(test))))


def _logits(federation: Federation, checkpoint: Checkpoint, images: ImageSet, client: str | None) -> Tensor:
    """As evaluation computes them; the resident model then holds the adapter of the global model, or the client's."""
    method, state = federation.method, checkpoint.state
    federation.model.load_adapter(adapter_of(method, state, client))
    owner = next((one for one in federation.clients if one.id == client), None)
    return predicted(method, state, federation.trainer.reader, images, owner)


@contextlib.contextmanager
def _as_a_whole(target: Path) -> Iterator[Path]:
    """A folder beside the target that takes its name in the end; on an error it is gone, and the target as it was.

    Raises:
        UserError: it cannot be written.
    """
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        scratch.chmod(0o755)  # mkdtemp makes it private
        yield scratch
        for path in scratch.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors are written private too
        scratch.rename(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or one_line(error)}.") from None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
