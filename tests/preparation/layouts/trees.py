"""Functions that write small data sets in all layouts and return the numbers of images that a listing must contain."""

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

Counts = Counter[tuple[str, str, str | None]]
"""The number of images, keyed by (domain, class, split)."""


def picture(shade: int = 0, kind: str = "JPEG") -> bytes:
    """Return the bytes of an image file of 4 x 4 pixels, whose colour depends on `shade`."""
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (shade % 256, 128, 255 - shade % 256)).save(buffer, kind)
    return buffer.getvalue()


def grow(root: Path, files: Iterable[str], lists: Mapping[str, str] | None = None, backwards: bool = False) -> None:
    """Write an image to each path in `files` and the texts `lists` to their paths, sorted or in reverse order."""
    texts = dict(lists or {})
    for number, name in enumerate(sorted([*files, *texts], reverse=backwards)):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in texts:
            path.write_text(texts[name], "utf-8")
        else:
            path.write_bytes(picture(number))


def domainnet(root: Path, backwards: bool = False) -> Counts:
    lines = {
        "real": (["real/bus/real_1.jpg 1", "real/air plane/real_2.jpg 0"], ["real/bus/real_3.jpg 1"]),
        "sketch": (["sketch/zebra/sketch_1.jpg 2", "sketch/bus/sketch_2.jpg 1"], ["sketch/bus/sketch_3.jpg 1"]),
    }
    lists = {}
    for domain, (train, test) in lines.items():
        lists[f"splits/{domain}_train.txt"] = "\n".join(train) + "\n"
        lists[f"splits/{domain}_test.txt"] = "\r\n".join(test)
    files = [line.rsplit(" ", 1)[0] for parts in lines.values() for part in parts for line in part]
    grow(root, [*files, "real/bus/real_not_listed.jpg"], lists, backwards)
    return Counter(
        {
            ("real", "bus", "train"): 1,
            ("real", "air plane", "train"): 1,
            ("real", "bus", "test"): 1,
            ("sketch", "zebra", "train"): 1,
            ("sketch", "bus", "train"): 1,
            ("sketch", "bus", "test"): 1,
        }
    )


def nico(root: Path, backwards: bool = False) -> Counts:
    names, counts, files, lists = ["hot air balloon", "bear"], Counter(), [], {}
    for domain in ("autumn", "dim", "grass", "outdoor", "rock", "water"):
        for split, images in (("train", 2), ("test", 1)):
            lines = []
            for label, name in enumerate(names):
                for number in range(images):
                    path = f"NICO_DG/{domain}/{name}/{domain}_{split}{number}.jpg"
                    files.append(path)
                    lines.append(f"{path} {label}")
                    counts[domain, name, split] += 1
            lists[f"NICO_DG_official/{domain}_{split}.txt"] = "\n".join(lines)
    grow(root, files, lists, backwards)
    return counts


def office_home(root: Path, backwards: bool = False) -> Counts:
    files = [
        f"{domain}/{name}/{number:05}.jpg"
        for domain in ("Art", "Clipart", "Product", "Real_World")
        for name, images in (("Alarm_Clock", 2), ("TV", 1), ("Sink", 3))
        for number in range(images)
    ]
    grow(root, files, {"ImageInfo.csv": "Art,Clock,1,1\n"}, backwards)
    return Counter((path.split("/")[0].replace("_", " "), path.split("/")[1], None) for path in files)


def imageclef(root: Path, backwards: bool = False) -> Counts:
    names = ["aeroplane", "bike", "bird", "boat", "bottle", "bus"]
    names += ["car", "dog", "horse", "monitor", "motorbike", "people"]
    files, lists, counts = [], {}, Counter()
    for domain, folder in (("b", "251.x/"), ("c", "252.y/"), ("i", ""), ("p", "")):
        lines = []
        for label, name in enumerate(names):
            path = f"{domain}/{folder}n{label:03}.JPEG"
            files.append(path)
            lines.append(f"{path} {label}")
            counts[domain, name, None] += 1
        lists[f"list/{domain}List.txt"] = "\r\n".join(lines) + "\r\n"
    grow(root, files, lists, backwards)
    return counts


def pacs(root: Path, backwards: bool = False) -> Counts:
    files, lists, counts = [], {}, Counter()
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        parts: dict[str, list[str]] = {"train": [], "crossval": [], "test": []}
        for label, name in enumerate(("dog", "elephant", "guitar"), start=1):
            for number in range(4):
                path = f"{domain}/{name}/pic_{number:03}.{'png' if domain == 'sketch' else 'jpg'}"
                files.append(f"kfold/{path}")
                part = "crossval" if number == 3 else "train"
                parts[part].append(f"{path} {label}")
                parts["test"].append(f"{path} {label}")
                counts[domain, name, "test" if number == 3 else "train"] += 1
        lists |= {f"{domain}_{part}_kfold.txt": "\n".join(lines) for part, lines in parts.items()}
    grow(root, files, lists, backwards)
    return counts


def food101(root: Path, backwards: bool = False) -> Counts:
    names = ["apple_pie", "crème brûlée", "waffles"]
    train = [f"{name}/{number}" for name in names for number in (10, 9)]
    test = [f"{name}/{number}" for name in names for number in (8,)]
    lists = {"meta/classes.txt": "\n".join(names), "meta/train.txt": "\n".join(train), "meta/test.txt": "\n".join(test)}
    grow(root, [f"images/{path}.jpg" for path in train + test], lists, backwards)
    return Counter({("food101", name, "train"): 2 for name in names} | {("food101", name, "test"): 1 for name in names})


def eurosat(root: Path, backwards: bool = False) -> Counts:
    files = [f"2750/{name}/{name}_{number}.jpg" for name in ("AnnualCrop", "River") for number in range(3)]
    grow(root, files, None, backwards)
    return Counter({("eurosat", "AnnualCrop", None): 3, ("eurosat", "River", None): 3})


UCF_LISTS = {
    "ucfTrainTestlist/classInd.txt": "1 ApplyEyeMakeup\r\n2 HandstandPushups\r\n3 YoYo\r\n",
    "ucfTrainTestlist/trainlist01.txt": (
        "ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi 1\r\n"
        "HandstandPushups/v_HandStandPushups_g08_c01.avi 2\r\n"
        "YoYo/v_YoYo_g09_c02.avi 3\r\n"
    ),
    "ucfTrainTestlist/testlist01.txt": "ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi\r\nYoYo/v_YoYo_g01_c01.avi\r\n",
}
UCF_COUNTS: Counts = Counter(
    {
        ("ucf101", "Apply_Eye_Makeup", "train"): 1,
        ("ucf101", "Handstand_Pushups", "train"): 1,
        ("ucf101", "Yo_Yo", "train"): 1,
        ("ucf101", "Apply_Eye_Makeup", "test"): 1,
        ("ucf101", "Yo_Yo", "test"): 1,
    }
)


def ucf101(root: Path, backwards: bool = False) -> Counts:
    files = [
        "Apply_Eye_Makeup/v_ApplyEyeMakeup_g08_c01.jpg",
        "Apply_Eye_Makeup/v_ApplyEyeMakeup_g01_c01.jpg",
        "Hand_Stand_Pushups/v_HandStandPushups_g08_c01.jpg",
        "Yo_Yo/v_YoYo_g09_c02.jpg",
        "Yo_Yo/v_YoYo_g01_c01.jpg",
    ]
    grow(root, [f"UCF-101-midframes/{path}" for path in files], UCF_LISTS, backwards)
    return UCF_COUNTS


def domains(root: Path, backwards: bool = False) -> Counts:
    files = ["north sea/cod/a.JPG", "north sea/cod/b.jpeg", "north sea/ål/c.png", "baltic/ål/d.webp", "baltic/ål/e.bmp"]
    ignored = {
        "readme.txt": "",
        "baltic/ål/notes.txt": "",
        "baltic/ål/.hidden.jpg": "",
        "__MACOSX/baltic/x.jpg": "",
        ".git/a/b.jpg": "",
    }
    grow(root, files, ignored, backwards)
    return Counter({("north sea", "cod", None): 2, ("north sea", "ål", None): 1, ("baltic", "ål", None): 2})


def classes(root: Path, backwards: bool = False) -> Counts:
    grow(root, ["cod/1.jpg", "cod/2.jpg", "eel/1.tif", "preview.png"], None, backwards)
    return Counter({(root.name, "cod", None): 2, (root.name, "eel", None): 1})


def write_parquet(
    path: Path, columns: Mapping[str, object], metadata: Mapping[str, object] | None = None, rows: int = 2
) -> None:
    """Write a Parquet file with row groups of `rows` rows and JSON metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(dict(columns))
    table = table.replace_schema_metadata({key: json.dumps(value) for key, value in (metadata or {}).items()})
    pq.write_table(table, path, row_group_size=rows)


def parquet(root: Path, backwards: bool = False) -> Counts:
    counts: Counts = Counter()
    for domain in sorted(("photo", "sketch"), reverse=backwards):
        labels = [0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 0]
        names = [("dog", "cat")[label] for label in labels]
        splits = ["train", "val", "test"] * 4
        columns = {
            "image": [picture(number) for number in range(len(labels))],
            "label": pa.array(labels, pa.int16()),
            "label_name": pa.array(names).dictionary_encode(),
            "domain": pa.array([domain] * len(labels)).dictionary_encode(),
            "path": [f"{number}.jpg" for number in range(len(labels))],
            "split": splits,
        }
        write_parquet(root / f"{domain}.parquet", columns, {"fedsweep": {"labels": ["dog", "cat"]}})
        for name, split in zip(names, splits, strict=True):
            counts[domain, name, "train" if split == "train" else "test"] += 1
    return counts


MAKERS: dict[str, Callable[..., Counts]] = {
    make.__name__: make
    for make in (domainnet, nico, office_home, imageclef, pacs, food101, eurosat, ucf101, domains, classes, parquet)
}
