"""Exports of trained runs, which give the logits of the evaluation when timm and PEFT load them without fedsweep."""

import json
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsweep.common.errors import UserError
from fedsweep.export import write as writing
from fedsweep.export.card import ADAPTER, BACKBONE, read_card
from fedsweep.export.predict import load
from fedsweep.export.which_trial import Named
from fedsweep.export.write import export
from fedsweep.federation.build_and_run import build
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods.capabilities import predicted
from fedsweep.results import Store
from fedsweep.results.checkpoint import load as load_checkpoint
from tests.export.helpers import block, logits_without_fedsweep, play, read

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "export.md"


def evaluated(config: RunConfig, run: Named) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return each domain's test images (n, 3, h, w), labels (n,) and logits of the evaluation (n, classes)."""
    federation = build(config)
    state = load_checkpoint(run.trial.checkpoint, federation.initial_state()).state
    federation.model.load_adapter(state.adapter)
    reader, found = federation.trainer.reader, []
    for domain in federation.domains:
        images, labels = domain.test.take(torch.arange(len(domain.test)))
        found.append((images, labels, predicted(federation.method, state, reader, domain.test, domain=domain.name)))
    return found


def assert_equal_elsewhere(config: RunConfig, run: Named, folder: Path) -> None:
    """Check that an export gives the logits and the recorded accuracy of a run in a process without fedsweep."""
    domains = evaluated(config, run)
    found = logits_without_fedsweep(folder, torch.cat([images for images, *_ in domains]))
    expected = torch.cat([logits for *_, logits in domains])
    assert len(found) >= 100
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(found.argmax(1), expected.argmax(1))
    parts = found.split([len(images) for images, *_ in domains])
    right = [(part.argmax(1) == labels).double().mean() for part, (_, labels, _) in zip(parts, domains, strict=True)]
    assert sum(right).item() / len(right) == pytest.approx(read_card(folder).metrics["accuracy/mean"], abs=1e-12)


@pytest.mark.slow
def test_without_fedsweep_the_export_gives_the_logits_of_the_evaluation(
    small: RunConfig, run: Named, exported: Path, tmp_path
):
    folder = shutil.copytree(exported, tmp_path / "elsewhere")
    assert_equal_elsewhere(small, run, folder)


def test_the_guides_code_loads_an_export(exported: Path, monkeypatch: pytest.MonkeyPatch):
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    names: dict[str, Any] = {}
    monkeypatch.chdir(exported)
    exec(block(GUIDE), names)  # noqa: S102
    torch.testing.assert_close(names["logits"](images), load(exported).logits(images))


@pytest.mark.slow
def test_an_exported_clip_gives_the_logits_of_the_evaluation(small: RunConfig, tmp_path: Path):
    clip = {"backbone": "digits_clip", "lora.position": "mlp", "federation.depths": [6, 3]}
    config = small.override(clip, "test")
    run = play(Store(tmp_path / "mlruns"), "clip", config)
    export(run, tmp_path / "out")
    assert_equal_elsewhere(config, run, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["digits_vit", "digits_clip"])
def test_fully_trained_weights_give_the_logits_of_the_evaluation(small: RunConfig, tmp_path: Path, backbone: str):
    depths = [12, 6] if backbone == "digits_vit" else [6, 3]
    config = small.override({"method": "ft", "backbone": backbone, "federation.depths": depths}, "test")
    run = play(Store(tmp_path / "mlruns"), "ft", config)
    export(run, tmp_path / "out")
    assert_equal_elsewhere(config, run, tmp_path / "out")


def test_the_card_describes_the_export(run: Named, exported: Path):
    card = read_card(exported)
    assert sorted(card.sha256) == [ADAPTER, BACKBONE]
    assert (card.form, card.method, card.seed, card.round, card.outcome) == ("peft", "fedra", 0, 2, "finished")
    assert card.classes == tuple("0123456789")
    assert (card.images.size, card.images.mean, card.images.std) == (16, (0.5,) * 3, (0.5,) * 3)
    assert card.hyperparameters["lora.rank"] == 2
    assert len(card.hyperparameters) > 30
    assert card.metrics == dict(run.record.history[-1].metrics)
    assert card.digests == run.record.plan.digests
    assert card.origin.key == run.record.plan.key
    text = (exported / "README.md").read_text()
    assert f"accuracy/mean {card.metrics['accuracy/mean']:.4f}" in text
    assert "digits_vit" in text
    config = read(exported / "adapter_config.json")
    assert (config["r"], config["peft_type"], config["modules_to_save"]) == (2, "LORA", ["head"])
    assert len(config["target_modules"]) == 24


@pytest.mark.parametrize("by_test", [True, False])
@pytest.mark.parametrize("why", ["", "the best of 4 finished trials"])
def test_the_readme_calls_results_optimistic_if_test_images_chose_the_trial(
    run: Named, tmp_path: Path, by_test: bool, why: str
):
    export(replace(run, why=why, by_test=by_test), tmp_path / "out")
    text = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert why in text
    assert ("(optimistic, because the trial was chosen by results on test images) |" in text) == by_test
    assert read_card(tmp_path / "out").origin.chosen_by_test == by_test


def test_repeated_exports_are_bit_identical_and_readable_by_other_users(run: Named, exported: Path, tmp_path: Path):
    export(run, tmp_path / "out")
    files = sorted(path.name for path in exported.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(files) == 5
    for name in files:
        assert (exported / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
        assert stat.S_IMODE((exported / name).stat().st_mode) == 0o644


def test_an_export_is_written_only_to_an_empty_folder(run: Named, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    export(run, tmp_path / "empty")
    assert len(list((tmp_path / "empty").iterdir())) == 5
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    for target, what in ((tmp_path / "full", "is not empty"), (tmp_path / "full" / "mine", "is a file")):
        with pytest.raises(UserError) as refusal:
            export(run, target)
        assert str(refusal.value) == f"`--to` must be a new or an empty folder, but {target} {what}."
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]


def test_a_model_with_other_logits_is_not_exported(run: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writing, "TOLERANCE", -1.0)
    with pytest.raises(UserError, match="the logits of the exported model differ from those of the run by up to"):
        export(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_images_changed_is_not_exported(run: Named, tmp_path: Path):
    changed = run.record.plan.model_copy(update={"digests": {"data": "0", "weights": "0"}})
    other = Named(run.trial, type(run.record)(changed, None, run.record.history), run.name, None, "")
    with pytest.raises(UserError, match=r"^trial .* cannot be exported, because its data changed after it ran\.$"):
        export(other, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda folder: shutil.rmtree(folder), "there is no folder {folder}; `fedsweep export TRIAL --to {folder}` "
         "creates it."),
        (lambda folder: (folder / "export.json").unlink(), "the folder {folder} is not an export, because it has no "
         "export.json; `fedsweep export TRIAL --to DIR` creates an export."),
        (lambda folder: (folder / ADAPTER).unlink(), "the export {folder} is incomplete: adapter_model.safetensors is "
         "missing."),
        (lambda folder: (folder / ADAPTER).write_bytes(b"x"), "{folder}/adapter_model.safetensors has changed since "
         "the export: its SHA-256 is 2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881."),
        (lambda folder: edit(folder, "form", "other"), "{folder}/export.json: `form` must be 'peft' or 'whole', but it "
         'is "other".'),
        (lambda folder: edit(folder, "clases", []), "{folder}/export.json: `clases` is not an entry of an export's "
         "card; did you mean `classes`?"),
        (lambda folder: edit(folder, "sha256", {}), "`sha256` in the export's card must list backbone.safetensors, "
         "but it does not."),
        (lambda folder: edit(folder, "sha256", {"../x": "0"}), "a name must refer to a path inside {folder}, "
         "but `'../x'` does not."),
        (lambda folder: edit(folder, "backbone", {"call": "timm.create_model", "model": "hf-hub:a/b", "arguments": {},
                                                  "fetched": False}),
         "`backbone.model` hf-hub:a/b is not a model of timm."),
        (lambda folder: edit(folder, "backbone", {"call": "timm.create_model", "model": "vit_tiny_patch16_224",
                                                  "arguments": {"checkpoint_path": "x.bin"}, "fetched": False}),
         "{folder}/export.json: `arguments` of a backbone's recipe must be among img_size, in_chans, patch_size, "
         "embed_dim, depth, num_blocks, num_heads, mlp_ratio, num_classes, not `checkpoint_path`."),
    ],
)  # fmt: skip
def test_an_incomplete_export_is_an_error_in_one_sentence(exported: Path, tmp_path: Path, change, sentence: str):
    folder = shutil.copytree(exported, tmp_path / "out")
    change(folder)
    with pytest.raises(UserError) as refusal:
        load(folder)
    assert str(refusal.value) == sentence.format(folder=folder)


def edit(folder: Path, name: str, value: object) -> None:
    path = folder / "export.json"
    path.write_text(json.dumps({**read(path), name: value}))
