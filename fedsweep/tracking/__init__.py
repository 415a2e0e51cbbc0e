"""MLflow runs that show the contents of a results folder.

Only this package imports mlflow, and only a sweep's driver process writes runs.
"""

from fedsweep.tracking.destination import Destination, check_could_write, check_writable
from fedsweep.tracking.experiment import Registration, check_server
from fedsweep.tracking.recorder import Recorder, deliver_all

__all__ = [
    "Destination",
    "Recorder",
    "Registration",
    "check_could_write",
    "check_server",
    "check_writable",
    "deliver_all",
]
