from fedsweep.api import load_experiment as load_experiment
from fedsweep.api import load_report as load_report
from fedsweep.api import run as run
from fedsweep.api import tune as tune

__version__: str
