"""SGD with heavy-ball momentum (Polyak 1964; Sutskever et al. 2013, Eq. 1-2 in the form without dampening), the L2
penalty in the gradient, and clipping of the whole gradient's norm (Pascanu et al. 2013, Algorithm 1), in double
precision:

    g <- g min(1, c / |g|),    g <- g + wd x,    v <- m v + g,    x <- x - lr v
"""

import numpy as np


def descend(
    start: list[np.ndarray],
    gradients: list[list[np.ndarray]],
    lr: float,
    momentum: float,
    weight_decay: float,
    clip_norm: float | None,
) -> list[np.ndarray]:
    """Return the parameters after one step for each of `gradients[step][parameter]`."""
    x = [one.astype(np.float64) for one in start]
    v = [np.zeros_like(one) for one in x]
    for step in gradients:
        norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in step))
        factor = 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm
        for p in range(len(x)):
            v[p] = momentum * v[p] + factor * step[p].astype(np.float64) + weight_decay * x[p]
            x[p] = x[p] - lr * v[p]
    return x
