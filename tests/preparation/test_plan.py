"""The errors of a preparation's plan, and the content on which the key of a plan depends."""

import shutil

import numpy as np
import pytest
from PIL import Image

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts.folders import Domains
from fedsweep.preparation.layouts.parquet import Parquet
from fedsweep.preparation.plan import Options, make_plan
from fedsweep.preparation.prepare import prepare
from tests.preparation.helpers import Tree, plan_of, write_tree
from tests.preparation.layouts.trees import domainnet, grow, parquet


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "`--size` must be between 8 and 1024 pixels, but it is 0."),
        ({"size": -3}, "`--size` must be between 8 and 1024 pixels, but it is -3."),
        ({"size": 100_000}, "`--size` must be between 8 and 1024 pixels, but it is 100000."),
        ({"name": "a/b"}, "NAME must be a folder name of letters, digits and `_ . + -`, but it is `a/b`."),
        ({"name": ".."}, "NAME must be a folder name of letters, digits and `_ . + -`, but it is `..`."),
        ({"name": ""}, "NAME must be a folder name of letters, digits and `_ . + -`, but it is ``."),
        ({"test_fraction": 1.0}, "`--test-fraction` must be between 0 and 1, but it is 1.0."),
        ({"test_fraction": float("nan")}, "`--test-fraction` must be between 0 and 1, but it is nan."),
        ({"classes": 0}, "`--classes` must be at least 1, but it is 0."),
    ],
)
def test_impossible_options_are_rejected(tree, options, words):
    with pytest.raises(UserError) as refusal:
        make_plan(Options(**({"name": "set"} | options)), tree, Tree())
    assert str(refusal.value) == words


def test_a_data_set_with_only_training_images_gets_a_random_split(tmp_path):
    grow(tmp_path / "set", [f"train/{name}/{number}.jpg" for name in ("cod", "eel") for number in range(5)])
    plan = make_plan(Options("fish", 16), tmp_path / "set")
    assert plan.drawn
    assert (plan.domains[0].name, plan.domains[0].train) == ("fish", 8)
    grow(tmp_path / "set", ["test/cod/9.jpg"])
    assert not make_plan(Options("fish", 16), tmp_path / "set").drawn


@pytest.mark.parametrize(
    ("files", "domain"), [(["set/cod/1.jpg", "set/cod/2.jpg"], "set"), (["cod/1.jpg"] * 2, "fish")]
)
def test_only_a_data_set_without_domains_gives_its_name_to_a_domain(files, domain, tmp_path):
    grow(tmp_path / "set", [path.replace("1", str(number)) for number, path in enumerate(files)])
    assert make_plan(Options("fish", 16), tmp_path / "set").listing.domains == (domain,)


def test_more_classes_than_the_data_set_has_are_rejected(tree):
    with pytest.raises(
        UserError, match=r"^`--classes` must be between 1 and 3, the number of classes in .*, but it is 4\.$"
    ):
        plan_of(tree, Domains(), classes=4)


def test_a_domainnet_with_fewer_classes_than_the_default_is_listed_completely(tmp_path):
    expected = domainnet(tmp_path / "set")
    plan = make_plan(Options("domainnet"), tmp_path / "set")
    assert len(plan.listing.items) == sum(expected.values())
    assert plan.listing.class_names == ("air plane", "bus", "zebra")


def test_a_root_that_is_not_a_folder_is_rejected(tree):
    with pytest.raises(UserError, match=r"must be a folder with images, but .*nowhere does not exist\.$"):
        plan_of(tree / "nowhere")
    with pytest.raises(UserError, match=r"0\.png is a file\.$"):
        plan_of(tree / "photo" / "bus" / "0.png")


def test_file_times_and_the_roots_name_do_not_change_the_key(tree, tmp_path):
    copy = shutil.copytree(tree, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    assert plan_of(copy).key() == plan_of(tree).key()
    assert plan_of(write_tree(tmp_path / "third", images=9)).key() != plan_of(tree).key()


OTHER_TIMES = r"was prepared \(`photo/cat/b.bmp`\), so the images may have changed; use `--force` to prepare them"


@pytest.mark.parametrize("noted", [True, False])
def test_a_changed_image_of_the_same_size_is_noticed(tree, noted):
    pixels = np.zeros((16, 20, 3), np.uint8)
    for path in (tree / "photo" / "cat" / "a.bmp", tree / "photo" / "cat" / "b.bmp"):
        Image.fromarray(pixels).save(path)
    made = prepare(plan_of(tree))
    if not noted:  # an old card without times
        (made.folder / "card.json").write_text(made.card.model_copy(update={"times": ""}).model_dump_json())
    assert prepare(plan_of(tree)).already
    Image.fromarray(pixels + 9).save(tree / "photo" / "cat" / "b.bmp")
    with pytest.raises(UserError, match=OTHER_TIMES):
        prepare(plan_of(tree))
    assert prepare(plan_of(tree), force=True).card.digest != made.card.digest
    assert prepare(plan_of(tree)).already


def test_a_copy_with_the_same_file_times_counts_as_prepared(tree, tmp_path):
    prepare(plan_of(tree))
    shutil.copytree(tree, tmp_path / "elsewhere")
    assert prepare(plan_of(tmp_path / "elsewhere")).already


def test_only_parquet_files_affect_the_key(tmp_path):
    parquet(root := tmp_path / "rows")
    plans = [plan_of(root, Parquet())]
    assert sorted(plans[0].stamps) == ["photo.parquet", "sketch.parquet"]
    (root / "README.md").write_text("mine")
    (root / "data").mkdir()
    (root / "data" / "card.json").write_text("{}")
    plans.append(plan_of(root, Parquet()))
    assert plans[0].key() == plans[1].key()
    assert plans[0].times() == plans[1].times()
