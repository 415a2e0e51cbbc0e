"""Classes of other installed packages, found by their entry points."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, create_model

import fedsweep.methods
from fedsweep.common import plugins
from fedsweep.common.errors import UserError
from fedsweep.common.yaml_values import read_yaml
from fedsweep.federation.build_and_run import check_digests, content_digests
from fedsweep.federation.run_config import RunConfig
from fedsweep.methods import BUILT_IN
from fedsweep.results import Store
from fedsweep.sweep.cluster import node_requirements
from fedsweep.sweep.cluster.node_requirements import Needs, look
from fedsweep.sweep.plan import plan as plan_module
from fedsweep.sweep.plan.plan import Plan
from fedsweep.sweep.running.open_sweep import new_sweep, resumed_sweep
from tests.plugin_packages import METHOD, Install, forget, install
from tests.sweep.helpers import GRID, write_space

__all__ = ["install"]
ODD = "`odd` in group fedsweep.methods of the installed package odd-package 0.1"
REMOVE = "or uninstall odd-package."
METHODS = {**GRID, "space": {"method": {"grid": ["fedra", "odd"]}}, "baseline": {"method": "fedra"}}
EXPERIMENT = Path(__file__).parents[2] / "experiments" / "fedra_digits.yaml"


@pytest.fixture
def with_odd(install: Install, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that installs the method `odd` in a version, and returns the class of configurations."""

    def make(version: str = "0.1", code: str = METHOD) -> Any:
        install(code, version=version)
        extended = create_model("RunConfig", __base__=RunConfig, method=(fedsweep.methods.MethodConfig, ...))
        monkeypatch.setattr(plan_module, "RunConfig", extended)
        return extended

    return make


def test_without_plugins_there_are_only_fedsweeps_own_classes() -> None:
    assert plugins.installed() == ()
    assert fedsweep.methods.ALL == BUILT_IN
    assert plugins.versions() == {}


def test_an_installed_method_is_listed_and_can_be_named(install: Install) -> None:
    install()
    *others, odd = fedsweep.methods.ALL
    assert tuple(others) == BUILT_IN
    adapter: TypeAdapter[Any] = TypeAdapter(fedsweep.methods.MethodConfig)
    assert adapter.validate_python({"name": "odd", "strength": 0.25}) == odd(strength=0.25)
    assert adapter.validate_python({"name": "fedra"}) == BUILT_IN[0]()


def test_a_configuration_contains_the_plugins_hyperparameters_and_near_names(with_odd: Any) -> None:
    config = with_odd().of({**read_yaml(EXPERIMENT), "method": "odd"}, "mine")
    assert config.override({"method.strength": 0.75}, "mine").method.strength == 0.75
    for change, said in {
        "method.strenth": "mine: `method.strenth` is not a hyperparameter of this run; did you mean `method.strength`",
        "method": r"mine: `method.name` must be one of .*, fedsa_lora, odd, but it is `odds`; did you mean `odd`\?",
    }.items():
        with pytest.raises(UserError, match=said):
            config.override({change: "odds"}, "mine")


BROKEN: dict[str, tuple[str, Mapping[str, str], str]] = {
    "missing module": (
        METHOD,
        {"odd": "even_package:Odd"},
        "must be importable, but `even_package:Odd` is not (ModuleNotFoundError: No module named 'even_package'); "
        "repair it",
    ),
    "missing class": (
        METHOD,
        {"odd": "odd_package:Even"},
        "must be importable, but `odd_package:Even` is not (AttributeError: module 'odd_package' has no attribute "
        "'Even'); repair it",
    ),
    "failing module": (
        f"{METHOD}\n1 / 0",
        {"odd": "odd_package:Odd"},
        "must be importable, but `odd_package:Odd` is not (ZeroDivisionError: division by zero); repair it",
    ),
    "wrong base": (
        "class Odd:\n    name = 'odd'",
        {"odd": "odd_package:Odd"},
        "must name a class that inherits from fedsweep.methods.base.FederatedMethod, but `odd_package:Odd` does not; "
        "correct the entry point",
    ),
    "no class": (
        METHOD,
        {"odd": "odd_package:Literal"},
        "must name a class that inherits from fedsweep.methods.base.FederatedMethod, but `odd_package:Literal` does "
        "not; correct the entry point",
    ),
    "abstract class": (
        f"{METHOD}\n    from abc import abstractmethod\n    @abstractmethod\n    def twist(self): ...\n",
        {"odd": "odd_package:Odd"},
        "must name a class that inherits from fedsweep.methods.base.FederatedMethod and defines `twist`, but "
        "`odd_package:Odd` does not; add what is missing",
    ),
    "other name": (
        METHOD.replace('"odd"', '"even"'),
        {"odd": "odd_package:Odd"},
        'must have a class that declares `name: Literal["odd"] = "odd"`, but the name of `odd_package:Odd` is even; '
        "make them equal",
    ),
    "variable name": (
        METHOD.replace('Literal["odd"]', "str"),
        {"odd": "odd_package:Odd"},
        'must have a class that declares `name: Literal["odd"] = "odd"`, but the name of `odd_package:Odd` is odd; '
        "make them equal",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_entry_point_is_reported_with_its_package_the_rule_and_the_remedy(install: Install, case: str) -> None:
    code, points, rule = BROKEN[case]
    install(code, {"methods": points})
    with pytest.raises(UserError) as caught:
        assert fedsweep.methods.ALL
    assert re.sub(r", at \S+odd_package\.py:\d+", "", str(caught.value)) == f"the entry point {ODD} {rule}, {REMOVE}"


def test_an_error_in_a_plugins_module_is_reported_with_the_line_of_the_plugin(install: Install) -> None:
    for mistake in ("1 / 0", "import odd_unknown", "import json; json.loads('x')"):
        path = install(f"\n\n{mistake}\n{METHOD}") / "odd_package.py"
        with pytest.raises(UserError, match=rf"\(\w+: .*, at {re.escape(str(path))}:3\); repair it"):
            assert fedsweep.methods.ALL


def test_a_taken_name_is_reported(install: Install) -> None:
    install(METHOD.replace('"odd"', '"fedra"'), {"methods": {"fedra": "odd_package:Odd"}})
    taken = "must not have a name of fedsweep itself; rename its class, or uninstall odd-package."
    with pytest.raises(UserError, match=f"the entry point `fedra` in group .* odd-package 0.1 {taken}"):
        assert fedsweep.methods.ALL
    install()
    install(METHOD, {"methods": {"odd": "second_package:Odd"}}, package="second-package", version="2")
    taken = "must not have a name of the package odd-package; rename its class, or uninstall second-package"
    with pytest.raises(UserError, match=f"the installed package second-package 2 {taken}"):
        assert fedsweep.methods.ALL


def test_a_plugin_that_is_imported_first_is_listed(install: Install) -> None:
    """A plug-in's own tests import the plug-in before fedsweep, whose list then must not import it a second time."""
    folder = install()
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import odd_package as o; import fedsweep.methods as m; "
    done = subprocess.run([sys.executable, "-c", f"{code}print(m.ALL[-1] is o.Odd)"], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_a_plugins_version_contains_the_digest_of_its_code(install: Install) -> None:
    install()
    (one,) = plugins.versions([("methods", "odd"), ("methods", "fedra")]).items()
    assert one == ("odd-package", plugins.versions()["odd-package"])
    assert one[1].startswith("0.1 (code ")
    assert plugins.versions([("methods", "fedra"), ("data", "odd")]) == {}
    install(f"{METHOD}\n# changed")
    changed = plugins.versions()["odd-package"]
    assert changed.startswith("0.1 (code ")
    assert changed != one[1]


def digest_of_odd() -> str:
    """Return the version with the digest of `odd-package`, whose code may have changed since the last call."""
    forget()
    return plugins.versions([("methods", "odd")])["odd-package"]


def write(folder: Path, name: str, content: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)


@pytest.mark.parametrize("changed", ["aaa_methods.py", "odd_package.py"])
def test_the_digest_covers_the_modules_of_all_entry_points_of_a_package(install: Install, changed: str) -> None:
    folder = install(
        groups={"methods": {"odd": "odd_package:Odd", "even": "aaa_methods:Even"}, "metrics": {"two": "zzz:Two"}}
    )
    for name in ("aaa_methods.py", "zzz.py", "of_another_package.py"):
        write(folder, name, "")
    before = digest_of_odd()
    write(folder, "of_another_package.py", "changed = True")
    assert digest_of_odd() == before
    write(folder, changed, "changed = True")
    assert digest_of_odd() != before


@pytest.mark.parametrize("changed", ["odd_helper.py", "odd_tools/deep.py", "odd_tools/weights.json"])
def test_the_digest_covers_the_files_that_the_metadata_of_a_package_list(install: Install, changed: str) -> None:
    folder = install()
    listed = ["odd_package.py", "odd_helper.py", "odd_tools/deep.py", "odd_tools/weights.json"]
    for name in listed[1:]:
        write(folder, name, "{}")
    own = ["odd_package-0.dist-info/direct_url.json", "__editable___odd_finder.py"]
    write(folder, "odd_package-0.dist-info/RECORD", "".join(f"{name},,\n" for name in [*listed, *own, "missing.py"]))
    before = digest_of_odd()
    for name in own:
        write(folder, name, "a path that differs between nodes")
    assert digest_of_odd() == before
    write(folder, changed, "[]")
    assert digest_of_odd() != before


def test_the_digest_of_an_editable_package_covers_the_files_next_to_its_module(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, project = install(), tmp_path / "project"
    project.mkdir()
    (site / "odd_package.py").rename(project / "odd_package.py")
    monkeypatch.syspath_prepend(project)
    before = digest_of_odd()
    write(project, "odd_helper.py", "")
    after = digest_of_odd()
    assert after != before
    (project / "odd_helper.py").rename(project / "renamed.py")
    assert digest_of_odd() not in (before, after)


def test_the_digest_ignores_hidden_files_and_links_to_missing_files(install: Install, tmp_path: Path) -> None:
    folder = install(groups={"methods": {"odd": "odd_tools:Odd"}})
    write(folder, "odd_tools/__init__.py", METHOD)
    before = digest_of_odd()
    (folder / "odd_tools" / ".#deep.py").symlink_to(tmp_path / "missing")
    (folder / "odd_tools" / "gone.py").symlink_to(tmp_path / "missing")
    write(folder, "odd_tools/.hidden.py", "")
    (folder / "odd_tools" / "folder.py").mkdir()
    assert digest_of_odd() == before


def test_a_trials_key_and_provenance_contain_the_versions_of_its_plugins(
    with_odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    space = {**METHODS, "seeds": [0]}
    write_space(tmp_path, "tiny", space)
    keys = {}
    for version in ("0.1", "0.2", "0.1"):
        with_odd(version)
        plan = Plan.read("tiny", {}, {})
        fedra, odd = plan.grid()
        used = f"odd-package {plugins.versions()['odd-package']}"
        assert odd.marks["plugins"] == odd.digests["plugins"] == plan.digests()["plugins"] == used
        assert "plugins" not in {**fedra.marks, **fedra.digests}
        assert keys.setdefault(version, (fedra.key, odd.key)) == (fedra.key, odd.key)
    assert keys["0.1"][0] == keys["0.2"][0]
    assert keys["0.1"][1] != keys["0.2"][1]


def test_a_sweep_is_resumed_only_with_the_same_plugins(
    with_odd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_space(tmp_path, "tiny", METHODS)
    with_odd()
    store = Store(tmp_path / "mlruns")
    sweep = new_sweep(Plan.read("tiny", {}, {}), store)
    assert resumed_sweep(Plan.read("tiny", {}, {}), store, sweep) is sweep
    with_odd("0.2")
    changed = "cannot be resumed because its plug-ins have changed since the sweep was started; undo the change"
    with pytest.raises(UserError, match=changed):
        resumed_sweep(Plan.read("tiny", {}, {}), store, sweep)


def test_a_worker_with_another_version_of_a_plugin_does_not_run_the_trial(with_odd: Any) -> None:
    config = with_odd().of({**read_yaml(EXPERIMENT), "method": "odd"}, "mine")
    planned = content_digests(config)
    check_digests(config, planned)
    with_odd("0.2")
    with pytest.raises(UserError, match="the plugins of this trial changed after its sweep began; start a new sweep"):
        check_digests(config, planned)


def test_a_node_needs_the_plugins_of_the_sweep(
    with_odd: Any, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # `look` sets variables, which other tests must not see
    write_space(tmp_path, "tiny", METHODS)
    monkeypatch.setattr(node_requirements, "RunConfig", with_odd())
    needs = Needs.of(Plan.read("tiny", {}, {}))
    (version,) = needs.plugin_versions.values()
    assert look(needs).problems == []
    with_odd("0.2")
    other = plugins.versions()["odd-package"]
    assert look(needs).problems == [f"has the plug-in odd-package {other}, not {version}"]
    install(groups={"methods": {}})
    assert look(needs).problems == [f"lacks the plug-in odd-package {version}"]


def test_help_imports_no_plugin(install: Install) -> None:
    folder = install("print('imported')")
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); sys.argv[1:] = ['--help']; "
    code += "from fedsweep.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "imported" not in done.stdout
    assert "doctor" in done.stdout
