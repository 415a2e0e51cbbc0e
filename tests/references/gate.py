"""The adapter of FedMS's gate (Section 3.3), sigmoid(BN(W2 BN(W1 x + b1) + b2)), in double precision.

Batch normalisation is Ioffe and Szegedy (ICML 2015): Algorithm 1 on a batch, with the biased variance; Algorithm 2 in
evaluation, with running means of the batches' means and of their unbiased variances, n / (n - 1) times the biased ones.
A batch of one image has no variance. It is normalised as in evaluation, and the running values do not change.
"""

import numpy as np


class Norm:
    """One batch normalisation; `moments` are its running mean and variance."""

    def __init__(self, scale: np.ndarray, shift: np.ndarray, momentum: float = 0.1, eps: float = 1e-5) -> None:
        self.scale, self.shift, self.momentum, self.eps = scale, shift, momentum, eps
        self.moments = np.zeros(len(scale)), np.ones(len(scale))

    def __call__(self, x: np.ndarray, training: bool) -> np.ndarray:
        """Return the normalised rows (n, width)."""
        mean, variance = self.moments
        if training and len(x) > 1:
            mean, variance = x.mean(axis=0), x.var(axis=0)
            now = mean, variance * len(x) / (len(x) - 1)
            self.moments = tuple(
                (1 - self.momentum) * old + self.momentum * new for old, new in zip(self.moments, now, strict=True)
            )
        return (x - mean) / np.sqrt(variance + self.eps) * self.scale + self.shift


class Gate:
    """The adapter; its tensors have the names of torch.nn.Sequential(Linear, BatchNorm1d, Linear, BatchNorm1d)."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = {name: one.astype(np.float64) for name, one in tensors.items()}
        self.norms = [Norm(self.tensors[f"{place}.weight"], self.tensors[f"{place}.bias"]) for place in (1, 3)]

    def __call__(self, x: np.ndarray, training: bool) -> np.ndarray:
        """Return the weights lambda (n,) of features (n, width)."""
        x = x.astype(np.float64)
        for place, norm in zip((0, 2), self.norms, strict=True):
            x = norm(x @ self.tensors[f"{place}.weight"].T + self.tensors[f"{place}.bias"], training)
        return 1 / (1 + np.exp(-x[:, 0]))
