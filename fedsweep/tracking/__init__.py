"""The only room for mlflow: runs as a view of what the store holds, written by one process, the driver."""

from fedsweep.tracking.catch_up import deliver_all
from fedsweep.tracking.code_origin import environment, git_commit
from fedsweep.tracking.destination import Destination, check_writable, tracking_uri
from fedsweep.tracking.model_registry import Registration
from fedsweep.tracking.recorder import Recorder
from fedsweep.tracking.server import check_server
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
    "environment",
    "git_commit",
    "page_links",
    "page_url",
    "run_name",
    "server_command",
    "tracking_uri",
]
