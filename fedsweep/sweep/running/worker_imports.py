"""The slow modules of a trial, which a worker imports before its first trial.

If a sweep starts Ray itself, Ray imports this module in each worker as soon as the worker starts.
"""

import importlib

from fedsweep.common.imports import without_collections

MODULES = ("fedsweep.sweep.running.trainable", "fedsweep.federation.build_and_run", "timm", "peft")

with without_collections():
    for _name in MODULES:
        importlib.import_module(_name)
