"""FedBRICK's BRICK, annealing and losses of both stages (Zhang et al., AAAI 2026), in loops and float64."""

import numpy as np


def brick(x: np.ndarray, a1, b1, a2, b2, gate: str) -> np.ndarray:
    """Return E(x) = x * sigma(B1 A1 x) + B2 A2 x + x for one token x (d,) (Eqs. 17 to 19)."""
    x1, x2 = b1 @ (a1 @ x), b2 @ (a2 @ x)
    if gate == "softmax":
        powers = [np.exp(value - max(x1)) for value in x1]
        weights = [power / sum(powers) for power in powers]
    else:
        weights = [1 / (1 + np.exp(-value)) for value in x1]
    return np.array([x[i] * weights[i] + x2[i] + x[i] for i in range(len(x))])


def alpha(step: int, steps: int) -> float:
    """Return the annealed weight alpha (Eq. 22) of step e = 0, 1, ..., E_2 - 1, where E_2 is `steps`."""
    return 1 - step / steps


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    total = 0.0
    for row, label in zip(logits, labels, strict=True):
        total += np.log(sum(np.exp(row - max(row)))) + max(row) - row[label]
    return total / len(labels)


def stage_one_walk(tokens, blocks, bricks, held):
    """Return the tokens after the blocks that the client holds, with BRICKs in place of the other blocks."""
    for layer in range(len(blocks)):
        tokens = blocks[layer](tokens) if layer in held else bricks[layer](tokens)
    return tokens


def stage_one_loss(logits, labels, weights, old_weights, theta, old_theta, lambda_w, lambda_theta) -> float:
    """Return the loss of stage I (Eq. 21) for weights of held blocks and theta of the BRICKs of missing blocks."""
    loss = cross_entropy(logits, labels)
    for name in weights:
        loss += lambda_w * float(((weights[name] - old_weights[name]) ** 2).sum())
    for name in theta:
        loss += lambda_theta * float(((theta[name] - old_theta[name]) ** 2).sum())
    return loss


def stage_two_walk(tokens, blocks, bricks, held, share):
    """Return the tokens after Eq. 23, and the mean over elements of (E(x) - f(x))^2 for each held block."""
    gaps = []
    for layer in range(len(blocks)):
        own = bricks[layer](tokens)
        if layer in held:
            block = blocks[layer](tokens)
            gaps.append(float(((own - block) ** 2).mean()))
            tokens = share * block + (1 - share) * own
        else:
            tokens = own
    return tokens, gaps


def stage_two_loss(logits, labels, gaps, lambda_d) -> float:
    """Return the loss of stage II (Eq. 24), where `gaps` are the mean squared differences of `stage_two_walk`."""
    return cross_entropy(logits, labels) + lambda_d / len(gaps) * sum(gaps)
