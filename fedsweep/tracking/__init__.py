"""MLflow runs of what the store contains; no other package imports mlflow, and only the driver writes."""

from fedsweep.tracking.destination import Destination, check_writable, tracking_uri
from fedsweep.tracking.experiment import Registration, check_server
from fedsweep.tracking.recorder import Recorder, deliver_all
from fedsweep.tracking.trial_description import run_name
from fedsweep.tracking.ui import answers, check_free, page_links, page_url, server_command

__all__ = [
    "Destination",
    "Recorder",
    "Registration",
    "answers",
    "check_free",
    "check_server",
    "check_writable",
    "deliver_all",
    "page_links",
    "page_url",
    "run_name",
    "server_command",
    "tracking_uri",
]
