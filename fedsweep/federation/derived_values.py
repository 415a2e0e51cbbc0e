"""Values that a run computes from several of its settings, such as the scaling of LoRA."""

import math

from fedsweep.federation.run_config import RunConfig
from fedsweep.results.unnamed_changes import COHORT_SHARE, IMAGES, SCALING, STEPS, TRAINED_SHARE


def derived_values(config: RunConfig) -> dict[str, float]:
    """Return the derived values of a run, keyed by the names in `fedsweep.results.unnamed_changes`.

    A value is left out if the run does not have it. For example, a method without LoRA has no scaling.
    """
    clients, local, partition = list(config.client_domains()), config.local, config.partition
    shares = (partition.proxy_share, partition.test_share, partition.tuning_share, partition.validation_share)
    kept = math.prod(1 - share for share in shares)
    found = {COHORT_SHARE: len(config.first_cohort(clients)) / len(clients), TRAINED_SHARE: kept}
    if config.method.needs.lora:
        found[SCALING] = config.lora.effective_scaling
    if isinstance(local.steps, int):
        found[IMAGES] = local.steps * local.batch_size
    else:
        found[STEPS] = 1000 * local.epochs / local.batch_size
    return {name: round(value, 12) for name, value in found.items()}
