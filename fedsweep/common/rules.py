"""Rules that involve several fields of a configuration but no model, so that they can be checked without torch.

Each function yields an error message for each violated rule, as `Config._violations` does.
"""

from collections.abc import Iterator
from typing import Any


def one_scale(lora: Any) -> Iterator[str]:
    """Yield an error message unless exactly one of the fields `alpha` and `scaling` of LoRA's options is given."""
    if (lora.alpha is None) == (lora.scaling is None):
        given = f"alpha {lora.alpha} and scaling {lora.scaling}"
        yield f"exactly one of `lora.alpha` and `lora.scaling` must be given, but got {given}"


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
