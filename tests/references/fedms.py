"""FedMS's capability queue, mixture, gate and aggregation of gates (Wu et al., IEEE TMC), in loops and float64."""

import numpy as np


def active_blocks(accuracies: list[float], length: int, threshold: float, blocks: int, initial: int = 1) -> list[int]:
    """Return the number of active blocks in each round and after the last round (Eq. 5, Section 3.2).

    The accuracy of round i is compared with the mean of rounds i - Q to i - 1 if there are Q earlier rounds.
    """
    active = [initial]
    for i, accuracy in enumerate(accuracies):
        now = active[-1]
        if i >= length:
            gain = accuracy - sum(accuracies[i - length : i]) / length
            if gain < threshold:
                now = min(now + 1, blocks)
        active.append(now)
    return active


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / (np.sqrt((a * a).sum()) * np.sqrt((b * b).sum())))


def mixture(mix: float, images: tuple, texts: tuple, scale: float) -> np.ndarray:
    """Return the logits (classes,) of one image by Eq. 6.

    `images` are the image features (d,) and `texts` the text features (classes, d) of the global and the local expert.
    """
    return scale * np.array(
        [
            mix * cosine(images[0], texts[0][c]) + (1 - mix) * cosine(images[1], texts[1][c])
            for c in range(len(texts[0]))
        ]
    )


def gate_mean(gates: list[dict[str, np.ndarray]], losses: list[float]) -> dict[str, np.ndarray]:
    """Return the mean of the clients' gates weighted by their losses, Z_g = sum_i (L_i / sum_j L_j) Z_i (Eq. 7)."""
    total = sum(losses)
    mean = {name: np.zeros_like(one, dtype=np.float64) for name, one in gates[0].items()}
    for gate, loss in zip(gates, losses, strict=True):
        for name in mean:
            mean[name] += loss / total * gate[name]
    return mean


def gate(x: np.ndarray, w1, b1, norm1, w2, b2, norm2, eps: float = 1e-5) -> float:
    """Return the weight lambda of features `x` (d,): MLP, batch norm, MLP, batch norm, sigmoid (Section 3.3).

    `norm1` and `norm2` are the (mean, variance, weight, bias) of batch norms in evaluation mode.
    """
    hidden = w1 @ x + b1
    hidden = (hidden - norm1[0]) / np.sqrt(norm1[1] + eps) * norm1[2] + norm1[3]
    out = (w2 @ hidden + b2 - norm2[0]) / np.sqrt(norm2[1] + eps) * norm2[2] + norm2[3]
    return float(1 / (1 + np.exp(-out[0])))
