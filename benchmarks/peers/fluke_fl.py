"""Time fluke on the common work; run this file with the Python of an environment that contains `fluke-fl`."""

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from work import BATCH, CLASSES, CLIENTS, RATE, cpu_seconds, data_of_clients, model, report


def simulate(rounds: int) -> None:
    """Run `rounds` rounds of federated averaging without evaluation."""
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        FastDataLoader(*one, num_labels=CLASSES, batch_size=BATCH, shuffle=True, skip_singleton=False)
        for one in data_of_clients
    ]
    splitter = DataSplitter(DummyDataContainer(loaders, [None] * CLIENTS, None, CLASSES))
    client = {"batch_size": BATCH, "local_epochs": 1, "loss": "CrossEntropyLoss"}
    client |= {"optimizer": {"name": "SGD", "lr": RATE}, "scheduler": {"name": "StepLR", "gamma": 1, "step_size": 1}}
    options = DDict({"client": client, "server": {"weighted": True}, "model": model()})
    FedAVG(CLIENTS, splitter, options).run(rounds, 1.0, finalize=False)


if __name__ == "__main__":
    report("fluke-fl", cpu_seconds(simulate))
