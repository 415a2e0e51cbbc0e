"""Time pfl-research on the common work; run this file with the Python of an environment that contains `pfl`."""

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import BATCH, CLASSES, CLIENTS, RATE, WIDTH, cpu_seconds, data_of_clients, report


class Network(nn.Linear):
    """The linear model with the functions that pfl-research calls."""

    def loss(self, features: Tensor, labels: Tensor, eval: bool = False) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return F.cross_entropy(self(features), labels)

    def metrics(self, features: Tensor, labels: Tensor, eval: bool = False) -> dict[str, float]:
        """Return no metrics, because the work has no evaluation."""
        return {}


def simulate(rounds: int) -> None:
    """Run `rounds` rounds of federated averaging."""
    torch.manual_seed(0)
    network = Network(WIDTH, CLASSES)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    sampler = get_user_sampler("minimize_reuse", list(range(CLIENTS)))
    users = FederatedDataset(lambda user: PyTorchTensorDataset(data_of_clients[user]), sampler)
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, rounds + 1, CLIENTS, None),
        SimulatedBackend(users, None),
        model,
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE),
        None,
        [],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    report("pfl", cpu_seconds(simulate))
