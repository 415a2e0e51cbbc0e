"""Adam (Kingma and Ba, ICLR 2015, Algorithm 1) in loops over single numbers and double precision:

    m <- b1 m + (1 - b1) g,    v <- b2 v + (1 - b2) g^2,    m^ = m / (1 - b1^t),    v^ = v / (1 - b2^t),
    x <- x - lr m^ / (sqrt(v^) + eps)

Weight decay is an L2 penalty, g <- g + wd x, or decoupled, x <- x - lr wd x before the step (Loshchilov and Hutter,
ICLR 2019, Algorithm 2). The norm of the whole gradient is clipped first (Pascanu et al. 2013, Algorithm 1).
"""

import math

import numpy as np


def descend(
    start: list[np.ndarray],
    gradients: list[list[np.ndarray]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    clip_norm: float | None,
) -> list[np.ndarray]:
    """Return the parameters after one step for each of `gradients[step][parameter]`."""
    shapes, sizes = [one.shape for one in start], [one.size for one in start]
    x = [float(value) for one in start for value in one.flat]
    m, v = [0.0] * len(x), [0.0] * len(x)
    for t, step in enumerate(gradients, start=1):
        g = [float(value) for one in step for value in one.flat]
        norm = math.sqrt(sum(value * value for value in g))
        if clip_norm is not None and norm > clip_norm:
            g = [value * clip_norm / norm for value in g]
        for i in range(len(x)):
            if decoupled:
                x[i] -= lr * weight_decay * x[i]
            else:
                g[i] += weight_decay * x[i]
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g[i]
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g[i] * g[i]
            first, second = m[i] / (1 - betas[0] ** t), v[i] / (1 - betas[1] ** t)
            x[i] -= lr * first / (math.sqrt(second) + eps)
    ends = np.cumsum(sizes)[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(np.array(x), ends), shapes, strict=True)]
