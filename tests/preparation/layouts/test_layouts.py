"""The properties of single layouts, and their error messages."""

import os
import re
import shutil
from pathlib import Path

import pytest

from fedsweep.common.errors import UserError
from fedsweep.preparation.layouts import ALL
from fedsweep.preparation.layouts.base import Listing
from fedsweep.preparation.layouts.disk_listing import list_folder
from tests.preparation.layouts import trees

SOURCES = {source.name: source() for source in ALL}


def listing(layout: str, root: Path, num_classes: int | None = None) -> Listing:
    return SOURCES[layout].list(root, num_classes)


def refused(layout: str, root: Path, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        listing(layout, root)
    assert "\n" not in str(caught.value)
    assert str(caught.value)[-1] in ".?"


# Lists: DomainNet and NICO++


def test_domainnet_lists_may_be_next_to_the_domains(tmp_path: Path) -> None:
    trees.domainnet(tmp_path)
    expected = listing("domainnet", tmp_path)
    for path in (tmp_path / "splits").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / "splits").rmdir()
    assert listing("domainnet", tmp_path) == expected


def test_domains_that_are_not_unpacked_are_left_out(tmp_path: Path) -> None:
    trees.domainnet(tmp_path)
    shutil.rmtree(tmp_path / "sketch")
    got = listing("domainnet", tmp_path)
    assert got.domains == ("real",)
    assert got.absent == ("clipart", "infograph", "painting", "quickdraw", "sketch")
    shutil.rmtree(tmp_path / "real")
    refused("domainnet", tmp_path, "real_train.txt, line 1: there is no file `real/bus/real_1.jpg` in")
    trees.nico(tmp_path / "nico")
    shutil.rmtree(tmp_path / "nico" / "NICO_DG" / "dim")
    got = listing("nico", tmp_path / "nico")
    assert (got.absent, len(got.items)) == (("dim",), 5 * 6)


def test_domainnet_takes_the_first_100_classes(tmp_path: Path) -> None:
    files = [f"real/c{label:03}/a.jpg" for label in range(120)]
    lines = "".join(f"{path} {label}\n" for label, path in enumerate(files))
    test = "real/c000/b.jpg 0\n"
    # Images of later classes may be missing.
    trees.grow(tmp_path, [*files[:110], "real/c000/b.jpg"], {"real_train.txt": lines, "real_test.txt": test})
    assert len(listing("domainnet", tmp_path).class_names) == 100
    assert len(listing("domainnet", tmp_path, 110).items) == 111
    with pytest.raises(UserError, match=r"line 111: there is no file `real/c110/a.jpg` in .*no folder"):
        listing("domainnet", tmp_path, 120)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("real/bus/none.jpg 1", "there is no file `real/bus/none.jpg` in"),
        ("real/bus/real_4.jpg 1", "; did you mean `real_3.jpg` or `real_1.jpg` or `real_not_listed.jpg`?"),
        ("real/buss/real_1.jpg 3", "there is no folder `real/buss`."),
        ("real/bus/real_1.jpg", "must be `<path of an image> <label>`, but it is `real/bus/real_1.jpg`."),
        ("real/bus/real_1.jpg one", "must be `<path of an image> <label>`, but it is `real/bus/real_1.jpg one`."),
        ("1", "must be `<path of an image> <label>`, but it is `1`."),
        ("real/bus/real_9.jpg -1", "a label must be between 0 and 344, but it is -1."),
        ("real/bus/real_9.jpg 345", "a label must be between 0 and 344, but it is 345."),
        ("real/bus/real_9.jpg 2", "class `bus` has label 2 here, but 1 in "),
        ("real/zebra/real_9.jpg 1", "label 1 is class `zebra` here, but `bus` in "),
        ("real_9.jpg 1", "an image must be in a class folder, but its path is `real_9.jpg`."),
        ("/etc/real_9.jpg 1", "a path must not lead out of the root, but it is `/etc/real_9.jpg`."),
        ("real/../../real_9.jpg 1", "a path must not lead out of the root, but it is `real/../../real_9.jpg`."),
        ("real/bus/real_3.jpg 1", "`real/bus/real_3.jpg` is listed again, after "),
        ("./real/bus/real_1.jpg 1", "an image must be listed only once, in train or in test."),
    ],
)
def test_an_invalid_line_of_a_list_is_rejected(line: str, sentence: str, tmp_path: Path) -> None:
    trees.domainnet(tmp_path)
    bad = tmp_path / "splits" / "real_test.txt"
    bad.write_text(f"real/bus/real_3.jpg 1\n\n{line}\n")
    refused("domainnet", tmp_path, f"{bad}, line 3: ")
    refused("domainnet", tmp_path, sentence)


def test_an_invalid_list_is_rejected(tmp_path: Path) -> None:
    trees.domainnet(tmp_path)
    test = tmp_path / "splits" / "real_test.txt"
    test.write_bytes(b"real/bus/\xff.jpg 1\n")
    refused("domainnet", tmp_path, f"{test} cannot be read: it is not UTF-8 text (byte 9).")
    test.write_text("\n \n")
    refused("domainnet", tmp_path, f"the list {test} is empty.")
    test.unlink()
    refused("domainnet", tmp_path, f"{tmp_path / 'splits'} has the list `real_train.txt`, but not `real_test.txt`.")


def test_a_label_without_images_is_rejected_among_the_first_classes(tmp_path: Path) -> None:
    lists = {"real_train.txt": "real/a/1.jpg 0\nreal/c/1.jpg 2\n", "real_test.txt": "real/a/2.jpg 0\n"}
    trees.grow(tmp_path, ["real/a/1.jpg", "real/c/1.jpg", "real/a/2.jpg"], lists)
    refused("domainnet", tmp_path, "a class must have images, but `label 1` has none in any domain.")
    assert listing("domainnet", tmp_path, 1).class_names == ("a",)


def test_a_domain_without_the_first_classes_is_rejected(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["a/x/1.jpg", "b/y/1.jpg"])
    assert len(listing("domains", tmp_path).items) == 2  # a class may be missing from a domain
    with pytest.raises(UserError, match=r"a domain must have images in the first 1 of \d+ classes, but `b` has none\."):
        listing("domains", tmp_path, 1)


def test_lists_may_contain_a_byte_order_mark_and_backslashes(tmp_path: Path) -> None:
    lists = {"real_train.txt": "\ufeffreal\\a\\1.jpg 0\r\n", "real_test.txt": "real/a/2.jpg\t0\n".replace("\t", " ")}
    trees.grow(tmp_path, ["real/a/1.jpg", "real/a/2.jpg"], lists)
    assert [item.path for item in listing("domainnet", tmp_path).items] == ["real/a/1.jpg", "real/a/2.jpg"]


def test_nico_lists_may_be_relative_to_the_domains_folder(tmp_path: Path) -> None:
    files = ["NICO_DG/rock/bear/1.jpg", "NICO_DG/rock/bear/2.jpg"]
    lists = {"NICO_DG/splits/rock_train.txt": "rock/bear/1.jpg 0", "NICO_DG/splits/rock_test.txt": "rock/bear/2.jpg 0"}
    trees.grow(tmp_path, files, lists)
    assert [(item.path, item.split) for item in listing("nico", tmp_path).items] == [
        (files[0], "train"),
        (files[1], "test"),
    ]


@pytest.mark.parametrize("base", ["NICO_DG", "public_dg_0416/train", "nico/train", ""])
def test_nico_without_lists_reads_folders(base: str, tmp_path: Path) -> None:
    files = [f"rock/{name}/1.jpg" for name in ("hot air balloon", "bear")] + ["dim/bear/2.jpg"]
    trees.grow(tmp_path, [os.path.join(base, path) for path in files], {"dg_label_id_mapping.json": "{}"})
    got = listing("nico", tmp_path)
    assert (got.domains, got.class_names) == (("dim", "rock"), ("bear", "hot air balloon"))
    assert {item.split for item in got.items} == {None}


# Office-Home, ImageCLEF-DA, PACS


@pytest.mark.parametrize("spelling", ["Real World", "Real_World", "RealWorld", "real_world"])
def test_every_spelling_of_an_office_home_domain_is_accepted(spelling: str, tmp_path: Path) -> None:
    trees.grow(tmp_path, ["art/Bed/1.jpg", f"{spelling}/Bed/1.jpg"])
    got = listing("office_home", tmp_path)
    assert got.domains == ("Art", "Real World")
    assert got.items[1].path == f"{spelling}/Bed/1.jpg"


def test_office_home_with_two_spellings_of_a_domain_is_rejected(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["Real World/Bed/1.jpg", "Real_World/Bed/1.jpg"])
    refused("office_home", tmp_path, "`Real World` and `Real_World` are both the domain `Real World`.")


def test_imageclef_lists_may_be_next_to_the_domains_and_a_domain_may_be_missing(tmp_path: Path) -> None:
    trees.imageclef(tmp_path)
    for path in (tmp_path / "list").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / "list").rmdir()
    (tmp_path / "bList.txt").unlink()
    got = listing("imageclef", tmp_path)
    assert (got.domains, len(got.class_names), len(got.items)) == (("c", "i", "p"), 12, 36)


def test_an_imageclef_image_with_two_labels_counts_twice(tmp_path: Path) -> None:
    trees.imageclef(tmp_path)
    with (tmp_path / "list" / "pList.txt").open("a") as file:
        file.write("p/n000.JPEG 11\n")
    items = [item for item in listing("imageclef", tmp_path).items if item.path == "p/n000.JPEG"]
    assert [item.label for item in items] == [0, 11]
    with (tmp_path / "list" / "pList.txt").open("a") as file:
        file.write("p/n000.JPEG 11\n")
    refused("imageclef", tmp_path, "pList.txt, line 14: `p/n000.JPEG` is listed again, after ")


def test_an_imageclef_label_out_of_range_is_rejected(tmp_path: Path) -> None:
    trees.imageclef(tmp_path)
    (tmp_path / "list" / "pList.txt").write_text("p/n000.JPEG 12\n")
    refused("imageclef", tmp_path, "pList.txt, line 1: a label must be between 0 and 11, but it is 12.")


def test_pacs_without_lists_has_no_split(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["photo/dog/1.jpg", "sketch/dog/1.png", "sketch/cat/2.png"])
    assert {item.split for item in listing("pacs", tmp_path).items} == {None}


@pytest.mark.parametrize(
    "place", ["Train val splits and h5py files pre-read", "pacs_label/pacs_label", "splits", "image_list", "kfold"]
)
def test_pacs_lists_are_found_in_a_folder_of_any_name(place: str, tmp_path: Path) -> None:
    trees.pacs(tmp_path)
    expected = listing("pacs", tmp_path)
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for path in tmp_path.glob("*_kfold.txt"):
        path.rename(tmp_path / place / path.name)
    assert listing("pacs", tmp_path) == expected
    assert {item.split for item in expected.items} == {"train", "test"}
    copy = (tmp_path / place).with_name("copy")
    copy.mkdir()
    shutil.copy(tmp_path / place / "photo_train_kfold.txt", copy)
    with pytest.raises(UserError, match="the lists must be in one folder, but they are in "):
        listing("pacs", tmp_path)


@pytest.mark.parametrize("place", ["", "PACS", "pacs_data/pacs_data"])
def test_pacs_domains_are_found_up_to_two_folders_down(place: str, tmp_path: Path) -> None:
    trees.grow(tmp_path / place, ["photo/dog/1.jpg", "sketch/dog/1.png"])
    got = listing("pacs", tmp_path)
    assert (got.domains, got.absent) == (("photo", "sketch"), ("art_painting", "cartoon"))


def test_pacs_classes_come_from_folders_even_if_a_list_is_wrong(tmp_path: Path) -> None:
    counts = trees.pacs(tmp_path)
    # Some copies of the authors' lists contain label 0, and list one image twice in place of another.
    (tmp_path / "photo_crossval_kfold.txt").write_text("photo/dog/pic_003.jpg 0\nphoto/dog/pic_003.jpg 1\n")
    got = listing("pacs", tmp_path)
    assert len(got.items) == counts.total() == 48
    assert sum(item.split == "test" for item in got.items) == 12


def test_an_invalid_list_of_pacs_is_rejected(tmp_path: Path) -> None:
    trees.pacs(tmp_path)
    crossval = tmp_path / "photo_crossval_kfold.txt"
    crossval.write_text("photo/dog/pic_000.jpg 1\n")
    refused(
        "pacs",
        tmp_path,
        "the lists of `photo` must not overlap, but train and crossval both contain `kfold/photo/dog/pic_000.jpg`.",
    )
    crossval.write_text("photo/dog/pic_009.jpg 1\n")
    refused("pacs", tmp_path, f"{crossval}, line 1: there is no file `kfold/photo/dog/pic_009.jpg` in")
    crossval.unlink()
    (tmp_path / "photo_train_kfold.txt").unlink()
    refused("pacs", tmp_path, "has lists `<domain>_train_kfold.txt`, but not `photo_train_kfold.txt`.")


# Food-101, EuroSAT, UCF101


def test_food101_is_found_one_folder_below_the_root(tmp_path: Path) -> None:
    counts = trees.food101(tmp_path / "food-101")
    assert len(listing("food101", tmp_path).items) == counts.total()


def test_an_invalid_list_of_food101_is_rejected(tmp_path: Path) -> None:
    trees.food101(tmp_path)
    test = tmp_path / "meta" / "test.txt"
    test.write_text("aple_pie/8\n")
    refused("food101", tmp_path, f"{test}, line 1: there is no class `aple_pie`; did you mean `apple_pie`?")
    test.write_text("apple_pie/7\n")
    refused("food101", tmp_path, f"{test}, line 1: there is no file `images/apple_pie/7.jpg` in {tmp_path}")
    test.write_text("apple_pie/10\n")
    refused("food101", tmp_path, f"`apple_pie/10` is listed again, after {tmp_path / 'meta' / 'train.txt'}, line 1;")
    (tmp_path / "meta" / "classes.txt").write_text("apple_pie\napple_pie\n")
    refused("food101", tmp_path, "classes.txt must list each class only once.")
    (tmp_path / "meta" / "classes.txt").unlink()
    refused("food101", tmp_path, "classes.txt cannot be read: No such file or directory.")


@pytest.mark.parametrize("base", ["2750", "EuroSAT", "EuroSAT/2750", ""])
@pytest.mark.parametrize("suffix", ["jpg", "tif"])
def test_eurosat_is_found_in_any_of_its_folders(base: str, suffix: str, tmp_path: Path) -> None:
    trees.grow(tmp_path, [os.path.join(base, f"River/River_1.{suffix}")])
    assert listing("eurosat", tmp_path).items[0].path == os.path.join(base, f"River/River_1.{suffix}")


@pytest.mark.parametrize("with_class_folders", [True, False])
def test_ucf101_takes_the_middle_frame(with_class_folders: bool, tmp_path: Path) -> None:
    videos = [
        "ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01",
        "ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01",
        "HandstandPushups/v_HandStandPushups_g08_c01",
        "YoYo/v_YoYo_g09_c02",
        "YoYo/v_YoYo_g01_c01",
    ]
    folders = [video if with_class_folders else video.split("/")[1] for video in videos]
    files = [f"jpegs_256/{folder}/frame{number}.jpg" for folder in folders for number in range(1, 13)]
    trees.grow(tmp_path, files, trees.UCF_LISTS)
    got = listing("ucf101", tmp_path)
    # Of 12 frames in numerical order, frame 7 is in the middle (place 6, counted from 0).
    assert sorted(item.path for item in got.items) == sorted(f"jpegs_256/{folder}/frame7.jpg" for folder in folders)
    assert got.class_names == ("Apply_Eye_Makeup", "Handstand_Pushups", "Yo_Yo")
    for item in got.items:
        assert ("ApplyEyeMakeup", "HandStandPushups", "YoYo")[item.label] in item.path
        assert item.split == ("test" if "_g01_" in item.path else "train")
        assert item.group == f"{item.label}/g{item.path.split('_g')[-1][:2]}"  # clips of the same source video


@pytest.mark.parametrize("folder", ["rawframes", "jpegs_256"])
def test_ucf101_ignores_optical_flow(folder: str, tmp_path: Path) -> None:
    lists = {
        "ucfTrainTestlist/classInd.txt": "1 YoYo\n",
        "ucfTrainTestlist/trainlist01.txt": "YoYo/v_YoYo_g09_c02.avi 1\n",
        "ucfTrainTestlist/testlist01.txt": "YoYo/v_YoYo_g01_c01.avi\n",
    }
    videos = [f"{folder}/YoYo/v_YoYo_{video}" for video in ("g01_c01", "g09_c02")]
    names = [f"{kind}_{number:05}.jpg" for kind in ("img", "flow_x", "flow_y") for number in range(1, 4)]
    trees.grow(tmp_path, [f"{video}/{name}" for video in videos for name in names], lists)
    assert [item.path for item in listing("ucf101", tmp_path).items] == [f"{video}/img_00002.jpg" for video in videos]
    (tmp_path / videos[0] / "depth_00001.jpg").write_bytes(trees.picture())
    refused("ucf101", tmp_path, "must differ only in their numbers, but they begin with `depth_`, `img_`.")


def test_ucf101_without_frames_is_an_error_with_the_expected_files(tmp_path: Path) -> None:
    trees.grow(tmp_path, [], trees.UCF_LISTS)
    refused("ucf101", tmp_path, "and image folders, but found folders `ucfTrainTestlist`")


def test_an_invalid_list_of_ucf101_is_rejected(tmp_path: Path) -> None:
    trees.ucf101(tmp_path)
    train = tmp_path / "ucfTrainTestlist" / "trainlist01.txt"
    train.write_text("YoYo/v_YoYo_g09_c03.avi 3\n")
    folder = tmp_path / "UCF-101-midframes" / "Yo_Yo"
    refused("ucf101", tmp_path, f"{train}, line 1: there is no frame of `v_YoYo_g09_c03` in {folder}; did you mean")
    train.write_text("YoYos/v_YoYo_g09_c02.avi 3\n")
    refused("ucf101", tmp_path, f"{train}, line 1: there is no class `YoYos`; did you mean `YoYo`?")
    train.write_text("YoYo/v_YoYo_g09_c02.avi 2\n")
    refused("ucf101", tmp_path, f"{train}, line 1: the label of class `YoYo` must be 3, but it is 2.")
    train.write_text("YoYo/v_YoYo_g09_c02.avi 4\n")
    refused("ucf101", tmp_path, f"{train}, line 1: a label must be between 1 and 3, but it is 4.")
    train.write_text("YoYo/v_YoYo_g01_c01.avi 3\n")
    refused("ucf101", tmp_path, "`YoYo/v_YoYo_g01_c01.avi` is listed again, after ")
    (tmp_path / "ucfTrainTestlist" / "classInd.txt").write_text("1 YoYo\n3 Archery\n")
    refused("ucf101", tmp_path, "classInd.txt, line 2: the line must be `2 <ClassName>`, but it is `3 Archery`.")


# A user's own folders


def test_splits_may_be_above_classes(tmp_path: Path) -> None:
    files = ["train/cod/1.jpg", "train/eel/1.jpg", "val/cod/2.jpg", "test/eel/3.jpg"]
    trees.grow(tmp_path / "fish", files)
    got = listing("classes", tmp_path / "fish")
    assert got.domains == ("fish",)
    assert {item.path: item.split for item in got.items} == {
        **dict.fromkeys(files[:2], "train"),
        **dict.fromkeys(files[2:], "test"),
    }


@pytest.mark.parametrize("form", ["{split}/{domain}", "{domain}/{split}"])
def test_splits_may_be_above_or_within_domains(form: str, tmp_path: Path) -> None:
    parts = [("north", "train"), ("north", "val"), ("south", "train"), ("south", "test")]
    folders = [form.format(domain=domain, split=split) for domain, split in parts]
    trees.grow(tmp_path, [f"{folder}/{name}/1.jpg" for folder in folders for name in ("cod", "eel")])
    got = listing("domains", tmp_path)
    assert (got.domains, got.class_names) == (("north", "south"), ("cod", "eel"))
    for (domain, split), folder in zip(parts, folders, strict=True):
        items = [item for item in got.items if item.path.startswith(f"{folder}/")]
        assert [item.label for item in items] == [0, 1]
        assert {(item.domain, item.split) for item in items} == {(domain, "train" if split == "train" else "test")}


def test_one_domain_may_have_splits_and_another_none(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["north/train/cod/1.jpg", "north/test/cod/2.jpg", "south/cod/3.jpg"])
    assert [item.split for item in listing("domains", tmp_path).items] == ["test", "train", None]


def test_splits_are_not_mistaken_for_classes(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["cod/train/1.jpg", "cod/test/2.jpg", "eel/train/3.jpg"])
    refused("domains", tmp_path, f"{tmp_path}: class folders must be named after classes, but they are `test`, `train`")


def test_the_domain_is_named_after_the_root_for_any_spelling_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees.classes(tmp_path / "fish")
    monkeypatch.chdir(tmp_path / "fish")
    assert listing("classes", Path(".")).domains == ("fish",)
    assert listing("classes", Path("../fish/cod/..")).domains == ("fish",)


def test_a_class_without_images_is_left_out_and_an_empty_domain_is_rejected(tmp_path: Path) -> None:
    trees.domains(tmp_path)
    before = listing("domains", tmp_path)
    for name in ("cod", "eel", "aal"):
        (tmp_path / "baltic" / name).mkdir()
    found = listing("domains", tmp_path)
    assert found.items == before.items
    assert found.class_names == before.class_names  # the other domain has images of the class cod
    assert found.empty == ("baltic/aal", "baltic/cod", "baltic/eel")
    (tmp_path / "arctic").mkdir()
    refused(
        "domains", tmp_path, f"the domain `arctic` is empty: there are no images in {tmp_path / 'arctic'}/<class>/."
    )


def test_images_outside_of_class_folders_are_rejected(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["a/x/1.jpg", "a/1.jpg"])
    refused("domains", tmp_path, f"{tmp_path / 'a'}: images must be in class folders, but `1.jpg` is not.")
    (tmp_path / "a" / "1.jpg").unlink()
    trees.grow(tmp_path, ["a/x/deep/1.jpg"])
    refused("domains", tmp_path, "images must be directly in the class folder, but it contains the folders `deep`.")


def test_broken_links_are_rejected(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["a/x/1.jpg"])
    (tmp_path / "a" / "x" / "2.jpg").symlink_to(tmp_path / "gone.jpg")
    refused("domains", tmp_path, f"`{tmp_path / 'a' / 'x' / '2.jpg'}` is a broken link or not a regular file.")


@pytest.mark.parametrize(("name", "sentence"), [("a\\b", r"'a\\b'"), ("a\nb", r"'a\nb'")])
def test_names_that_cannot_name_a_file_are_rejected(name: str, sentence: str, tmp_path: Path) -> None:
    trees.grow(tmp_path, [f"{name}/x/1.jpg"])
    refused(
        "domains",
        tmp_path,
        "a domain must be printable, contain no `/` or `\\` and not begin with a dot, but it is " + sentence,
    )


def test_long_names_and_names_that_differ_only_in_case_are_rejected(tmp_path: Path) -> None:
    trees.grow(tmp_path, [f"{'é' * 101}/x/1.jpg"])
    refused("domains", tmp_path, "the name of a domain must have at most 200 bytes, but it is 'éé")
    trees.grow(tmp_path / "other", ["Photo/x/1.jpg", "photo/x/1.jpg"])
    refused("domains", tmp_path / "other", "the domains `Photo` and `photo` must differ in more than case.")


def test_names_that_are_not_utf8_are_rejected(tmp_path: Path) -> None:
    trees.grow(tmp_path, ["a/x/1.jpg"])
    try:
        Path(os.fsdecode(bytes(tmp_path / "a" / "x") + b"/\xff.jpg")).write_bytes(trees.picture())
    except OSError:
        pytest.skip("this file system allows only names in UTF-8")
    refused("domains", tmp_path, r"names must be encoded in UTF-8, but 'a/x/\udcff.jpg' is not.")


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file or directory"):
        list_folder(tmp_path / "none")
