"""Rules that involve several fields of a configuration but no model, so that they can be checked without torch.

Each function yields an error message for each violated rule, as `Config._violations` does.
"""

from collections.abc import Iterator
from typing import Any


def one_scale(lora: Any) -> Iterator[str]:
    """Yield the error messages about the fields of LoRA's options that set the scaling.

    Exactly one of `alpha` and `scaling` must be given, and a `rank_scaling` other than `held` needs `alpha`.
    """
    if (lora.alpha is None) == (lora.scaling is None):
        given = f"alpha {lora.alpha} and scaling {lora.scaling}"
        yield f"exactly one of `lora.alpha` and `lora.scaling` must be given, but got {given}"
    if lora.rank_scaling != "held" and lora.alpha is None:
        yield f"`lora.rank_scaling` {lora.rank_scaling} divides `lora.alpha`, which must be a number, but it is null"


def domains_fit(data: Any) -> Iterator[str]:
    """Yield the error messages about the fields `domains` and `held_out_domains` of a data set."""
    for field in ("domains", "held_out_domains"):
        names = getattr(data, field)
        if len(set(names)) < len(names):
            yield f"`data.{field}` must not repeat a domain, but it is {list(names)}"
    for name in data.held_out_domains:
        if name not in data.domains:
            rule = f"must be among `data.domains` ({', '.join(data.domains)})"
            yield f"`data.held_out_domains` {rule}, but one is `{name}`"
    if {*data.domains} <= {*data.held_out_domains}:
        rule = "must leave a domain to train on"
        yield f"`data.held_out_domains` {rule}, but it names all {len(data.domains)}"


def known_domains_fit(data: Any) -> Iterator[str]:
    """Yield the error messages about a data set that fedsweep makes, whose default `domains` are all its domains."""
    known = type(data).model_fields["domains"].get_default(call_default_factory=True, validated_data={})
    for domain in data.domains:
        if domain not in known:
            yield f"`data.domains` must be among {', '.join(known)}, but one is `{domain}`"
    if data.validation_fraction == "listed":
        yield f"`data.validation_fraction` must be a number below 1, because {data.name} lists no validation images"
    yield from domains_fit(data)


def sizes_given(federation: Any) -> Iterator[str]:
    """Yield the error messages about the fields that set the depths and the ranks of clients.

    Either `depths` is given, with or without `ranks`, or `capacity`, from which both follow.
    """
    if (federation.depths is None) == (federation.capacity is None):
        given = "both are given" if federation.depths is not None else "neither is"
        yield f"exactly one of `federation.depths` and `federation.capacity` must be given, but {given}"
    if federation.capacity is not None and federation.ranks is not None:
        yield "`federation.ranks` must be null if `federation.capacity` is given, because the ranks follow from it"


def sets_ranks(federation: Any) -> bool:
    """Return whether clients have ranks of their own, which the field `ranks` lists or a budget decides."""
    return federation.ranks is not None or (federation.capacity is not None and federation.fit != "depth")
