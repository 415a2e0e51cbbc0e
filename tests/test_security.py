"""Protection against names that lead out of their folders, and against files of others that contain code."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import fedsweep
from fedsweep.common import yaml_values as plain
from fedsweep.common.errors import UserError
from fedsweep.common.paths import find, inside
from fedsweep.data.data_config import load
from fedsweep.data.prepared.card import CARD, DomainCard, StoreCard, read_card
from fedsweep.data.prepared.dataset import PreparedData
from fedsweep.preparation.layouts.base import check_domains
from fedsweep.results import Store
from fedsweep.tracking import Destination
from fedsweep.tracking.parent_and_child_runs import Runs

PACKAGE = Path(fedsweep.__file__).parent
ELSEWHERE = [
    "../x",
    "../../etc/x",
    "a/../../../x",
    "/etc/x",
    "x\0y",
    "..",
    ".",
    "",
    "link",
    "link/x",
    "inner/../../out",
]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_cannot_lead_out_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    root = tmp_path / "a" / "store"
    for kind in ("sweeps", "artifacts", "trials"):
        (root / kind).mkdir(parents=True)
        (root / kind / "link").symlink_to(tmp_path)
    store = Store(root)
    with pytest.raises(UserError, match=r"^a name must refer to a path inside .*, but `.*` does not\.$"):
        inside(root / "sweeps", name)
    with pytest.raises(UserError, match="must refer to a path inside"):
        store.sweep(name, "s1")
    if "link" not in name:
        with pytest.raises(UserError, match="must refer to a path inside"):
            store.sweep("x", name)
        with pytest.raises(UserError, match="must refer to a path inside"):
            store.sweep("x", "s1").trial(name)
    client = SimpleNamespace(get_experiment_by_name=lambda name: None)
    monkeypatch.setattr(Destination, "client", lambda self: client)
    with pytest.raises(UserError, match="must refer to a path inside"):
        _ = Runs(Destination.of(root), name).experiment.id
    for kind in ("experiments", "search_spaces", "pretrain"):
        with pytest.raises(UserError, match="there is no"):
            find(kind, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ablations/lora_rank", "x", "a b", "métho.de", "..x", "x..y"])
def test_a_harmless_name_is_a_path_below_the_folder(tmp_path: Path, name: str) -> None:
    assert inside(tmp_path, name) == tmp_path / name
    assert Store(tmp_path).sweep(name, "s1").folder == tmp_path.resolve() / "sweeps" / name / "s1"


def test_the_results_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk" / "sweeps").mkdir(parents=True)
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "sweeps").symlink_to(tmp_path / "disk" / "sweeps")
    assert Store(tmp_path / "mlruns").sweep("x", "s1").folder == tmp_path.resolve() / "mlruns" / "sweeps" / "x" / "s1"


@pytest.mark.parametrize("name", [one for one in ELSEWHERE if one])
def test_the_name_of_a_data_set_cannot_be_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("FEDSWEEP_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match="there is no prepared data set"):
        load(PreparedData(name="prepared", set=name, size=8, domains=("a",)))


def test_the_domains_of_a_foreign_data_set_cannot_be_paths(tmp_path: Path) -> None:
    folder = tmp_path / "x-8"
    folder.mkdir()
    (tmp_path / "secret.arrow").write_bytes(b"12345")
    domain = DomainCard.model_construct(train=1, test=1, bytes=5)
    card = StoreCard.model_construct(
        name="x", size=8, layout="folders", class_names=("c",), domains={"../secret": domain}, digest="0" * 64,
        crop_pct=1.0, format=1,
    )  # fmt: skip
    (folder / CARD).write_text(json.dumps(card.model_dump(mode="json")))
    with pytest.raises(UserError, match="must refer to a path inside"):
        read_card(folder)


@pytest.mark.parametrize("domain", ["../x", "a/b", "/x", "a\\b", "x\0", ".x", ""])
def test_a_domain_that_cannot_name_a_file_is_rejected(tmp_path: Path, domain: str) -> None:
    with pytest.raises(UserError, match="the name of a domain must be printable"):
        check_domains(tmp_path, [domain])


# Unpickling

NEVER_IMPORTED = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle"}
ALLOWED = {("pickle", "UnpicklingError"), ("joblib", "cpu_count")}
NEVER_CALLED = {"eval", "exec", "compile", "read_pickle", "to_pickle", "unsafe_load", "full_load", "system", "popen"}


def faults(source: str) -> Iterator[str]:
    """Yield the imports and calls in a module's source that could execute the content of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] in {*NEVER_IMPORTED, "joblib"})
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {*NEVER_IMPORTED, "joblib"}:
            yield from (f"{node.module}.{one.name}" for one in node.names if (node.module, one.name) not in ALLOWED)
        elif isinstance(node, ast.Call):
            yield from _fault_of(node)


def _fault_of(call: ast.Call) -> Iterator[str]:
    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
    called = ast.unparse(call.func)
    last = called.rpartition(".")[2]
    if called in NEVER_CALLED - {"compile"} or (last in NEVER_CALLED - {"eval", "compile"} and "." in called):
        yield called
    if called == "compile":
        yield called
    if called in ("torch.load", "torch.jit.load", "torch.hub.load") and words.get("weights_only") != "True":
        yield called
    if called in ("timm.models.load_state_dict", "load_state_dict") and words.get("weights_only") != "True":
        yield called
    if called in ("yaml.load", "yaml.load_all") and words.get("Loader") not in ("_Loader", "yaml.SafeLoader"):
        yield called
    for word in ("allow_pickle", "trust_remote_code", "shell"):
        if words.get(word, "False") != "False":
            yield f"{called}({word})"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib",
        "from joblib import load",
        "import torch; torch.load('x')",
        "import torch; torch.load('x', weights_only=False)",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "import yaml; yaml.load(text, Loader=yaml.Loader)",
        "import yaml; yaml.unsafe_load(text)",
        "import pandas as pd; pd.read_pickle('x')",
        "eval(text)",
        "exec(text)",
        "from timm.models import load_state_dict; load_state_dict('x')",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "import subprocess; subprocess.run(text, shell=True)",
        "import os; os.system(text)",
    ],
)
def test_code_that_would_unpickle_or_execute_is_detected(source: str) -> None:
    assert list(faults(source))


def test_no_module_unpickles_or_executes_files() -> None:
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 100
    found = {path.relative_to(PACKAGE).as_posix(): list(faults(path.read_text())) for path in modules}
    copies = {"models/weight_cache.py": ["pickle"]}  # it copies networks through bytes that never leave the process
    assert {name: ones for name, ones in found.items() if ones} == copies
    assert issubclass(plain._Loader, yaml.SafeLoader)
