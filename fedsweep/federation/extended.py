"""The parts of a run's configuration whose choices plug-ins extend: aggregation rules and metrics.

These types are made here and not in `fedsweep.training`, because the modules of plug-ins import `fedsweep.training`.
"""

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from fedsweep.training.aggregation import AggregationConfig
from fedsweep.training.aggregation_rules import Mean, aggregation_rules
from fedsweep.training.base_optimizers import BaseOptimizerConfig
from fedsweep.training.evaluation import EvaluationConfig
from fedsweep.training.round_metrics import BUILT_IN, round_metrics


def aggregation_config() -> type[AggregationConfig]:
    """Return the class of the options of the aggregation, in which `rule` can be a rule of a plug-in.

    Without such plug-ins, this is `AggregationConfig` itself.
    """
    rules, plain = aggregation_rules(), AggregationConfig.model_fields["rule"]
    if len(rules) == 1:
        return AggregationConfig
    kinds: Any = Annotated[reduce(or_, rules), Field(discriminator="name")]
    field = kinds, Field(plain.default, description=plain.description)
    return create_model("AggregationConfig", __base__=AggregationConfig, __doc__=AggregationConfig.__doc__, rule=field)


def check_rule(aggregation: AggregationConfig, base_optimizer: BaseOptimizerConfig) -> None:
    """Raise ValueError if the aggregation rule of a plug-in cannot be combined with the other options of a run."""
    rule = aggregation.rule.name
    if rule == Mean().name:
        return
    if base_optimizer.name == "feddyn":
        raise ValueError(
            f"`base_optimizer` feddyn corrects the mean of the clients' models, but `aggregation.rule` {rule} does not "
            "average them"
        )
    if aggregation.lora == "product_svd":
        raise ValueError(
            "`aggregation.lora` product_svd averages the products B A and needs `aggregation.rule` mean, "
            f"but it is {rule}"
        )


def evaluation_config() -> type[EvaluationConfig]:
    """Return the class of the options of the evaluation, in which `metrics` can list metrics of plug-ins.

    Without such plug-ins, this is `EvaluationConfig` itself.
    """
    others, plain = tuple(round_metrics()), EvaluationConfig.model_fields["metrics"]
    if not others:
        return EvaluationConfig
    kinds: Any = tuple.__class_getitem__((Literal[(*BUILT_IN, *others)], ...))
    field = kinds, Field(plain.default, description=plain.description)
    return create_model("EvaluationConfig", __base__=EvaluationConfig, __doc__=EvaluationConfig.__doc__, metrics=field)


if TYPE_CHECKING:
    AnyAggregationConfig = AggregationConfig
    AnyEvaluationConfig = EvaluationConfig
else:
    AnyAggregationConfig = aggregation_config()
    AnyEvaluationConfig = evaluation_config()

__all__ = ["AnyAggregationConfig", "AnyEvaluationConfig", "aggregation_config", "check_rule", "evaluation_config"]
