"""The only room for mlflow: runs as a view of what the store holds, written by one process, the driver."""

from fedsweep.tracking.database import check_writable, tracking_uri
from fedsweep.tracking.origin import environment, git_commit
from fedsweep.tracking.page import page_links, server_command
from fedsweep.tracking.recorder import Recorder, run_name

__all__ = [
    "Recorder",
    "check_writable",
    "environment",
    "git_commit",
    "page_links",
    "run_name",
    "server_command",
    "tracking_uri",
]
