"""Component ablations on the command line: the names of their arms, and their error messages."""

from tests.cli.conftest import ROOT, Call, Refused, write

STAGES = (ROOT / "search_spaces" / "ablations" / "brick_stages.yaml").read_text()
PARTS = ["server_epochs", "compensate", "parallel", "anneal", "domains"]


def test_arms_are_labelled_with_the_components_that_they_leave_out(call: Call):
    shown = call("show", "ablations/brick_stages").out
    rows = [line.split("│")[2].strip() for line in shown.splitlines() if line.startswith("│")]
    assert rows == ["full", *(f"without {part}" for part in PARTS)]
    assert "18 trials of fedbrick_digits" in shown


def test_an_invalid_ablation_is_one_error_message(refused: Refused):
    write("search_spaces", "mine", STAGES, ("method.anneal: off", "method.aneal: off"))
    assert refused("tune", "mine") == (
        "search_spaces/mine.yaml:18:3: `method.aneal` is not a hyperparameter of this run; did you mean "
        "`method.anneal` or `method.rank` or `method.name`?"
    )
    write("search_spaces", "mine", STAGES, ("method.anneal: off", "method.anneal: on"))
    sentence = (
        "search_spaces/mine.yaml:18:18: `ablate` sets `method.anneal` to true, but it already has this value in the "
        "arm full."
    )
    assert refused("tune", "mine") == refused("show", "mine") == sentence


def test_subsets_must_be_one_or_all(refused: Refused):
    assert refused("tune", "ablations/brick_stages", "--subsets", "every") == (
        "search space ablations/brick_stages: `subsets` must be 'one' or 'all', but it is \"every\"."
    )
    assert refused("tune", "ablations/brick_stages", "method.anneal=false") == (
        "`method.anneal` is varied by search space ablations/brick_stages and cannot be overridden."
    )
