"""The only room for mlflow: runs as a view of what the store holds, written by one process, the driver."""

from fedsweep.tracking.database import check_writable, tracking_uri
from fedsweep.tracking.delivery import deliver_all
from fedsweep.tracking.destination import Destination
from fedsweep.tracking.origin import environment, git_commit
from fedsweep.tracking.page import answers, check_free, page_links, page_url, server_command
from fedsweep.tracking.picture import run_name
from fedsweep.tracking.recorder import Recorder
from fedsweep.tracking.registration import Registration
from fedsweep.tracking.server import check_server

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
