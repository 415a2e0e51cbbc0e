"""MLflow runs that show the content of a results folder.

Only this package imports mlflow, and only the driver process of a sweep writes the runs.
"""

from fedsweep.tracking.destination import Destination, check_writable
from fedsweep.tracking.experiment import Registration, check_server
from fedsweep.tracking.recorder import Recorder, deliver_all

__all__ = ["Destination", "Recorder", "Registration", "check_server", "check_writable", "deliver_all"]
