"""The counted work of the hot path does not grow: a change of a tenth fails, whatever the load of the machine."""

import json

import pytest

from benchmarks import counted
from fedsweep.models.timm.transformer_families import LayeredViT

KNOWN = json.loads(counted.RESULTS.read_text())["counts"]
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def found() -> dict[str, counted.Counts]:
    return counted.measure()


@pytest.mark.parametrize("part", KNOWN)
def test_the_counts_are_those_of_the_recorded_file(found, part):
    """After a deliberate change, run `python -m benchmarks.counted --write`."""
    assert set(found) == set(KNOWN)
    assert len(KNOWN) == 5
    assert found[part] == pytest.approx(KNOWN[part], rel=TOLERANCE, abs=1e-3)


def test_more_work_in_a_block_changes_the_counts(monkeypatch):
    federation, block = counted.digits(), LayeredViT.block
    before = counted.between(lambda steps: counted.fit(federation, 1, steps), 2, 3)
    monkeypatch.setattr(
        LayeredViT, "block", lambda model, layer, tokens: block(model, layer, block(model, layer, tokens))
    )
    after = counted.between(lambda steps: counted.fit(federation, 1, steps), 2, 3)
    for name in ("operators", "megabytes", "megaflop"):
        assert after[name] > (1 + TOLERANCE) * before[name], name


def test_a_call_is_counted_if_fedsweeps_own_code_makes_it():
    assert counted.calls(lambda: len([])) == 0
    federation = counted.digits()
    assert counted.calls(federation.shares) > len(federation.clients)
