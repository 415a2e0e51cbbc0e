"""The output, the files and the error messages of the commands `fedsweep data ...`."""

import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fedsweep.common.yaml_values import parse_yaml
from fedsweep.data.digits import STYLES
from fedsweep.data.prepared.card import read_card, store_folder
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.text_to_image import TextToImage
from tests.cli.conftest import Call, Refused
from tests.preparation.helpers import CLASSES, write_tree

PREPARE = ("data", "prepare", "animals", "--root", "tree", "--size", "16", "--workers", "1")


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """Write a folder of 2 domains x 3 classes x 10 images to the working directory."""
    monkeypatch.delenv("FEDSWEEP_DATA", raising=False)
    return write_tree(tmp_path / "tree")


@pytest.fixture
def prepared(tree, call: Call) -> Path:
    """Prepare the images of `tree`, and return the folder of the prepared data set."""
    assert call(*PREPARE).code == 0
    return store_folder("animals", 16)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_prepare_describes_the_data_set_and_its_use(tree, call: Call):
    answer = call(*PREPARE)
    assert (answer.code, answer.err) == (0, "")
    card = read_card(store_folder("animals", 16))
    assert card.layout == "domains"
    assert [row[:3] for row in rows(answer.out) if row and row[0] in ("photo", "sketch", "all")] == [
        ["photo", "24", "6"],
        ["sketch", "24", "6"],
        ["all", "48", "12"],
    ]
    assert "Layout domains; split drawn at random, 0.2 of each class for testing.\n" in answer.out
    assert f"Prepared: data/animals-16, 0.1 MB, digest {card.digest[:12]}\n" in answer.out
    line = answer.out.splitlines()[-1]
    given = parse_yaml(line, "line")["data"]
    assert PreparedData.of(given, "line").load().digest
    assert given["domains"] == ["photo", "sketch"]


def test_prepare_lists_missing_domains(tree, call: Call):
    answer = call("data", "prepare", "pacs", "--layout", "pacs", "--root", "tree", "--size", "16", "--workers", "1")
    assert "Domains left out, because they are not in the folder: art_painting, cartoon.\n" in answer.out
    assert call("data", "prepare", "tree", "--root", "tree/photo", "--size", "16", "--workers", "1").code == 0


def test_prepare_reports_an_existing_data_set(prepared, call: Call):
    answer = call(*PREPARE)
    assert answer.code == 0
    assert "Already prepared: data/animals-16" in answer.out


def test_prepare_warns_about_another_version_of_the_decoder(prepared, call: Call):
    assert "It was decoded with" not in call(*PREPARE).out
    card = read_card(prepared).model_copy(update={"made_with": "Pillow 1.0"})
    (prepared / "card.json").write_text(card.model_dump_json())
    assert "It was decoded with Pillow 1.0, but Pillow " in call(*PREPARE).out


def test_a_data_set_from_another_source_is_replaced_only_with_force(prepared, tree, call: Call, refused: Refused):
    (tree / "photo" / "bus" / "0.png").unlink()
    assert "(removed: `photo/bus/0.png`); use `--force` to replace it" in refused(*PREPARE)
    assert "Prepared: data/animals-16" in call(*PREPARE, "--force").out


def test_prepare_prints_warnings_and_rejects_them_on_demand(tree, call: Call, refused: Refused):
    (tree / "photo" / "bus").rename(tree / "photo" / "Bus")
    warning = "`Bus` and `bus` are different classes, although their names are alike"
    assert refused(*PREPARE, "--strict").endswith(f"tree: `--strict` allows no warnings, but {warning}.")
    answer = call(*PREPARE)
    assert (answer.code, answer.err) == (0, f"Warning: {warning}.\n")


def test_corrupt_images_are_listed_and_skipped_on_demand(tree, call: Call, refused: Refused):
    (tree / "photo" / "bus" / "4.png").write_bytes(b"no")
    sentence = refused(*PREPARE)
    assert sentence.startswith("1 image of animals cannot be decoded: photo/bus/4.png (not an image")
    answer = call(*PREPARE, "--skip-corrupt")
    assert answer.code == 0
    assert "Skipped images, which cannot be decoded: 1 (photo/bus/4.png)\n" in answer.out
    assert "skipped images: 1." in call("data", "show", "animals").out


def test_after_ctrl_c_prepare_explains_how_to_continue(tree, call: Call, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedsweep.preparation.prepare.prepare", stop)
    answer = call(*PREPARE)
    assert answer.code == 130
    assert "the images decoded so far are kept" in answer.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--size", "0"], "`--size` must be between 8 and 1024 pixels, but it is 0."),
        (["--workers", "0"], "`--workers` must be at least 1, but it is 0."),
        (["--layout", "domain"], "there is no layout `domain`; did you mean `domains`"),
        (["--test-fraction", "1.5"], "`--test-fraction` must be between 0 and 1, but it is 1.5."),
        (["--backbone", "vit_tiny_patch16_22"], "`--backbone`: timm has no model `vit_tiny_patch16_22`; did you mean"),
        (["--root", "nowhere"], "`--root` must be a folder with images, but "),
        (["--classes", "9"], "9"),
    ],
)
def test_a_wrong_option_is_one_error_message(tree, refused: Refused, words, sentence):
    assert sentence in refused("data", "prepare", "animals", "--root", "tree", *words)
    assert not Path("data").exists()


def test_a_name_that_cannot_be_a_folder_name_is_one_error_message(tree, refused: Refused):
    assert refused("data", "prepare", "../x", "--root", "tree").startswith("NAME must be a folder name")


def test_a_backbone_decides_the_crop(tree, call: Call):
    assert call(*PREPARE, "--backbone", "vit_tiny_patch16_224").code == 0
    assert read_card(store_folder("animals", 16)).crop_pct == 0.9
    assert "bicubic, center crop of 0.9" in call("data", "show", "animals").out


def test_list_prints_data_sets_and_layouts(prepared, call: Call):
    text = call("data", "list").out
    card = read_card(prepared)
    assert ["animals", "16", "60", "2", "3", "0.1", card.digest[:12]] in rows(text)
    assert "<domain>/<class>/*" in text
    names = [row[0] for row in rows(text) if row]
    assert {"domainnet", "office_home", "pacs", "domains", "classes", "parquet"} <= set(names)


def test_list_reports_a_damaged_data_set_and_lists_the_others(prepared, call: Call):
    (prepared / "photo.arrow").write_bytes(b"")
    answer = call("data", "list")
    assert answer.code == 0
    assert "Damaged: " in answer.out
    assert "layout" in answer.out


def test_list_names_an_unfinished_preparation(tree, call: Call, refused: Refused):
    (tree / "photo" / "bus" / "4.png").write_bytes(b"no")
    refused(*PREPARE)
    assert (
        "Unfinished: data/animals-16.part. To continue, run the same `fedsweep data prepare`"
        in call("data", "list").out
    )


def test_list_works_without_data_sets(tree, call: Call):
    assert call("data", "list").out.startswith("No data set is prepared yet in the folder data.\n")


def test_show_prints_counts_and_draws_a_figure(prepared, call: Call):
    answer = call("data", "show", "animals", "--verify")
    assert (answer.code, answer.err) == (0, "")
    lines = [" ".join(row) for row in rows(answer.out)]
    for name in CLASSES:
        assert f"{name} 8 / 2 8 / 2" in lines
    assert "all 24 / 6 24 / 6" in lines
    assert f"Digest {read_card(prepared).digest} (verified)" in answer.out
    assert "Contact sheet of 3 classes: data/animals-16.png" in answer.out
    with Image.open("data/animals-16.png") as image:
        assert (np.asarray(image.convert("RGB")) < 250).mean() > 0.2


def test_many_classes_are_summarised_unless_the_option_all_is_set(tmp_path, monkeypatch, call: Call):
    monkeypatch.delenv("FEDSWEEP_DATA", raising=False)
    for number in range(41):
        (folder := tmp_path / "tree" / "photo" / f"class_{number}").mkdir(parents=True)
        for image in range(2 + number % 3):
            Image.new("RGB", (16, 16), (number, image, 0)).save(folder / f"{image}.png")
    assert call(*PREPARE).code == 0
    short, whole = (call("data", "show", "animals", *words).out for words in ([], ["--all"]))
    lines = [" ".join(row) for row in rows(short)]
    for line in (
        "fewest in a class 1 / 1",
        "median 2 / 1",
        "most in a class 3 / 1",
        "all 81 / 41",
        "Use `--all` to list all 41 classes.",
    ):
        assert line in lines
    assert len(lines) < 15
    assert all(["class_" + str(number), str(1 + number % 3), "/", "1"] in rows(whole) for number in range(41))


def test_names_are_printed_without_interpreting_brackets(tree, call: Call):
    (tree / "photo").rename(tree / "[red]$a$")
    for domain in ("[red]$a$", "sketch"):
        (tree / domain / "cat").rename(tree / domain / "[x]\u732b")
    answers = call(*PREPARE), call("data", "show", "animals")
    for answer in answers:
        assert (answer.code, answer.err) == (0, "")
        assert "[red]$a$" in answer.out
    assert "[x]\u732b" in answers[1].out


def test_the_root_of_a_data_set_may_be_the_working_directory(tmp_path, monkeypatch, call: Call):
    monkeypatch.delenv("FEDSWEEP_DATA", raising=False)
    write_tree(tmp_path / "tree")
    monkeypatch.chdir(tmp_path / "tree")
    for said in ("Prepared", "Already prepared"):
        answer = call("data", "prepare", "animals", "--root", ".", "--size", "16", "--workers", "1")
        assert f"{said}: data/animals-16" in answer.out
        assert call("data", "show", "animals").code == 0


def test_show_writes_to_the_given_file(prepared, call: Call):
    assert "mine/sheet.png" in call("data", "show", "animals", "--size", "16", "--out", "mine/sheet.png").out
    assert Path("mine/sheet.png").exists()
    assert not Path("data/animals-16.png").exists()


def test_show_lists_the_images_of_a_split(prepared, tree, call: Call):
    listed = {}
    for split in ("train", "test"):
        answer = call("data", "show", "animals", "--split", split)
        assert (answer.code, answer.err) == (0, "")
        listed[split] = [line.split("\t") for line in answer.out.splitlines()]
    counts = read_card(prepared).domains
    assert {split: len(rows) for split, rows in listed.items()} == {
        split: sum(getattr(one, split) for one in counts.values()) for split in listed
    }
    everything = [*listed["train"], *listed["test"]]
    assert sorted(path for _, _, path in everything) == sorted(
        path.relative_to(tree).as_posix() for path in tree.rglob("*.png")
    )
    assert all(path.startswith(f"{domain}/{name}/") for domain, name, path in everything)


def test_images_that_are_listed_for_validation_are_counted_and_listed(tree, call: Call):
    splits = {"train": range(6), "val": range(6, 8), "test": range(8, 10)}
    for split, numbers in splits.items():
        for number in numbers:
            for path in sorted(tree.glob(f"[ps]*/*/{number}.png")):
                place = tree / split / path.relative_to(tree)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.rename(place)
    for domain in ("photo", "sketch"):
        shutil.rmtree(tree / domain)
    words = "Layout domains; split of the data set; test images listed for validation: 12."
    assert words in call(*PREPARE).out
    assert "listed for validation: 12; skipped images: 0." in call("data", "show", "animals").out
    for split, names in {"train": ["train"], "test": ["val", "test"], "validation": ["val"]}.items():
        paths = [line.split("\t")[2] for line in call("data", "show", "animals", "--split", split).out.splitlines()]
        assert sorted(paths) == sorted(
            path.relative_to(tree).as_posix() for name in names for path in (tree / name).rglob("*.png")
        )
    card = json.loads((store_folder("animals", 16) / "card.json").read_text())
    for domain in card["domains"].values():
        domain["validation"] = None
    card["plan"] = make_plan(Options("animals", 16), tree).key(with_validation=False)
    (store_folder("animals", 16) / "card.json").write_text(json.dumps(card))
    answer = call(*PREPARE)
    assert answer.code == 0
    assert "recording which of its test images are listed for validation; use `--force`" in " ".join(answer.out.split())
    assert "without recording" not in call(*PREPARE, "--force").out


def test_a_changed_pixel_is_found_by_verify(prepared, call: Call, refused: Refused):
    path = prepared / "sketch.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    assert call("data", "show", "animals").code == 0
    assert "has changed since it was prepared: its digest is " in refused("data", "show", "animals", "--verify")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["animal"], "there is no prepared data set `animal` in .*; did you mean `animals`?"),
        (
            ["animals", "--split", "tset"],
            "^`--split` must be train, test or validation, but it is `tset`; did you mean `test`",
        ),
        (["birds"], r"`fedsweep data prepare birds --root DIR` to prepare it\.$"),
        (["animals", "--size", "64"], "animals is prepared at 16 pixels, not at 64; run `fedsweep data prepare"),
    ],
)
def test_show_of_a_missing_data_set_is_one_error_message(prepared, refused: Refused, words, sentence):
    assert re.search(sentence, refused("data", "show", *words))


def test_a_damaged_card_is_one_error_message(prepared, refused: Refused):
    (prepared / "card.json").write_text("not JSON")
    assert "card.json is not valid JSON" in refused("data", "show", "animals")
    (prepared / "card.json").write_text(json.dumps({"name": "animals"}))
    assert "card.json: `" in refused("data", "show", "animals")


def test_partition_prints_a_table_and_draws_a_figure(tree, call: Call):
    answer = call("data", "partition", "fedra_digits")
    assert (answer.code, answer.err) == (0, "")
    assert [row[0] for row in rows(answer.out)[2:8]] == list(STYLES)
    assert "feature skew (skew 0.00)" in answer.out
    assert "Picture: partition-fedra_digits.png" in answer.out
    with Image.open("partition-fedra_digits.png") as image:
        assert (np.asarray(image.convert("RGB")) < 250).mean() > 0.2


def test_partition_names_classes_without_test_images(tree, call: Call):
    one_client = ("partition=centralized", "federation.depths=[12]", "data.domains=[plain]")
    answer = call("data", "partition", "fedra_digits", *one_client, "partition.test_share=0.001")
    assert (answer.code, answer.err) == (0, "")
    reason = "because images are held out without regard to their classes."
    assert re.search(rf"\nNo client has a test image of (`\d`, ){{4}}`\d` and 4 more, {reason}\n\nPicture", answer.out)
    assert "No client has" not in call("data", "partition", "fedra_digits", *one_client, "partition.test_share=0.1").out


SPACE = """# How skewed are the clients?
experiment: fedra_digits
fixed: {partition: {name: feature_label_skew, clients_per_domain: 2}, federation.depths: [12]}
space:
  partition.alpha: {grid: [0.1, 100]}
  lora.rank: {grid: [2, 4]}
seeds: [0, 1]
objective: {metric: accuracy/mean, mode: max}
search: {name: grid}
scheduler: {name: none}
"""


def test_a_search_space_has_a_panel_per_partition_with_its_first_seed(tree, call: Call):
    Path("search_spaces").mkdir()
    Path("search_spaces/skewed.yaml").write_text(SPACE)
    answer = call("data", "partition", "skewed", "--out", "picture.png")
    assert (answer.code, answer.err) == (0, "")
    titles = re.findall(r"^alpha (\S+) \(skew ([\d.]+)\)", answer.out, re.MULTILINE)
    assert [alpha for alpha, _ in titles] == ["0.1", "100.0"]
    assert float(titles[0][1]) > 0.2 > 0.1 > float(titles[1][1])
    assert sum(row[0].startswith("plain/") for row in rows(answer.out) if row) == 4
    assert Path("picture.png").exists()


def test_a_missing_partition_is_one_error_message(refused: Refused):
    assert "there is no experiment or search space `fedra_digit`" in refused("data", "partition", "fedra_digit")


DIFFUSERS = "{name: diffusers, model: tiny, template: 'a {class}', share: 0.0625, num_inference_steps: 2}"
GENERATE = ("data", "generate", "fedag_digits", "data.test_fraction=0.9", f"synthetic={DIFFUSERS}")


@pytest.fixture
def drawn(monkeypatch) -> None:
    """Replace the text-to-image model by a function that returns grey images.

    Only tests/preparation/test_generate.py loads a real model.
    """
    grey = io.BytesIO()
    Image.new("RGB", (32, 32), (128,) * 3).save(grey, "png")
    monkeypatch.setattr(TextToImage, "__init__", lambda *_: None)
    monkeypatch.setattr(TextToImage, "library", SimpleNamespace(__version__="0"), raising=False)
    monkeypatch.setattr(TextToImage, "content", lambda _: {"model": "0" * 40})
    monkeypatch.setattr(TextToImage, "check", lambda *_: None)
    monkeypatch.setattr(TextToImage, "png", lambda *_: grey.getvalue())


def test_generate_makes_the_images_once_and_prints_their_folder(tree, drawn, call: Call):
    answer = call(*GENERATE, "--workers", "1")
    assert (answer.code, answer.err) == (0, "")
    (folder,) = Path("data/generated").glob("digits-synthetic-*")
    assert f"Generated: {folder}, 44 of 44 images are new\n" in answer.out
    card = read_card(store_folder(folder.name, 16))
    assert f"Prepared: data/{folder.name}-16, 0.0 MB, digest {card.digest[:12]}\n" in answer.out
    assert ["all", "40", "4"] in [row[:3] for row in rows(answer.out)]
    again = call(*GENERATE, "--workers", "1")
    assert again.out == answer.out.replace("44 of 44", "0 of 44")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (GENERATE, "`synthetic.model` tiny is neither a folder nor in Hugging Face's cache"),
        (
            GENERATE[:3],
            "`synthetic.name` must be diffusers for `fedsweep data generate`, but",
        ),
        ((*GENERATE, "--device", "tpu"), "`--device` must be cpu or cuda, but it is `tpu`."),
        ((*GENERATE, "--device", "cuda"), "`--device` is cuda, but torch finds no GPU."),
        ((*GENERATE, "--workers", "0"), "`--workers` must be at least 1, but it is 0."),
        (("data", "generate", "fedag_digit"), "there is no experiment `fedag_digit`; did you mean `fedag_digits`"),
        (
            ("run", *GENERATE[2:]),
            "`synthetic` diffusers: the images are not generated yet; run `fedsweep data generate EXP",
        ),
    ],
)
def test_an_impossible_generation_is_one_error_message(tree, monkeypatch, refused: Refused, words, sentence):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert sentence in refused(*words)
    assert not Path("data").exists()


def test_after_ctrl_c_generate_explains_how_to_continue(tree, drawn, call: Call, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(TextToImage, "png", stop)
    answer = call(*GENERATE)
    assert answer.code == 130
    assert "the images generated so far are kept" in answer.err
