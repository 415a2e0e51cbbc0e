"""Time Flower's simulation on the common work; run this file with the Python of an environment that contains `flwr`."""

import logging
import time

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import BATCH, CLIENTS, IMAGES, RATE, data_of_clients, model, report

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client for an epoch."""
    torch.set_num_threads(1)
    network = model()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    features, labels = data_of_clients[int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    for rows in torch.randperm(IMAGES).split(BATCH):
        loss = F.cross_entropy(network(features[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": IMAGES})}
    return Message(content=RecordDict(content), reply_to=message)


def simulate(rounds: int) -> float:
    """Run `rounds` rounds of federated averaging without evaluation, and return their seconds.

    Other processes train the clients, so these are seconds of the clock. Two rounds before them are not counted,
    because they start the processes.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server_app, seconds = ServerApp(), list[float]()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        for count in (2, rounds):
            begun = time.perf_counter()
            strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=count)
            seconds.append(time.perf_counter() - begun)

    run_simulation(
        server_app, client_app, CLIENTS, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    )
    return seconds[-1]


if __name__ == "__main__":
    report("flwr", simulate, repeats=1)
