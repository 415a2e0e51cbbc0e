"""The card of a store, once its files are known to hold what was planned."""

from fedsweep.common.errors import UserError
from fedsweep.data.prepared.arrow_files import map_domain, stored_digest, sync
from fedsweep.data.prepared.card import CARD, DomainCard, StoreCard
from fedsweep.preparation.corrupt import Corrupt
from fedsweep.preparation.decode import MADE_WITH
from fedsweep.preparation.plan import Plan
from fedsweep.preparation.scratch import Scratch
from fedsweep.preparation.split import DomainPlan


def write_card(plan: Plan, scratch: Scratch, corrupt: Corrupt) -> StoreCard:
    """Write the card, with the digest of what can be read from the disk.

    Raises:
        UserError: a file holds other labels, paths or splits than planned.
    """
    card = StoreCard(
        name=plan.options.name,
        size=plan.options.size,
        layout=plan.source.name,
        class_names=plan.listing.class_names,
        domains={domain.name: _domain_card(domain, scratch, corrupt) for domain in plan.domains},
        digest="",
        crop_pct=plan.geometry.crop_pct,
        crop_mode=plan.geometry.crop_mode,
        interpolation=plan.geometry.interpolation,
        test_fraction=plan.options.test_fraction if plan.drawn else None,
        skipped=tuple(path for _, path, _ in corrupt),
        plan=plan.key(),
        times=plan.times(),
        made_with=MADE_WITH,
    )
    card = card.model_copy(update={"digest": stored_digest(scratch.folder, card)})
    with (scratch.folder / CARD).open("wb") as file:
        file.write(card.model_dump_json(indent=1).encode())
        file.flush()
        sync(file)
    return card


def _domain_card(domain: DomainPlan, scratch: Scratch, corrupt: Corrupt) -> DomainCard:
    """Counts of a domain's file, whose labels and paths are those of the plan; the digest would not tell."""
    path = scratch.arrow(domain.name)
    bad = {name for of_domain, name, _ in corrupt if of_domain == domain.name}
    kept = [(slot, item) for slot, item in domain.in_order() if item.path not in bad]
    train = sum(slot < domain.train for slot, _ in kept)
    found = map_domain(path)
    for part, wanted in zip(found, (kept[:train], kept[train:]), strict=True):
        labels, paths = [item.label for _, item in wanted], [item.path for _, item in wanted]
        if part.labels.tolist() != labels or part.paths.to_pylist() != paths:
            raise UserError(
                f"{path} holds other labels or images than were planned; remove {scratch.folder}, and the same command "
                "begins anew."
            )
    return DomainCard(train=len(found[0].labels), test=len(found[1].labels), bytes=path.stat().st_size)
