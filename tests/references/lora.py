"""LoRA (Hu et al.; arXiv 2106.09685), Eq. 3, in loops and double precision: h = W x + b + s B A x."""

import numpy as np


def forward(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, a: np.ndarray, b: np.ndarray, scaling: float
) -> np.ndarray:
    """Return h (n, d_out), given `x` (n, d_in), `weight` (d_out, d_in), `a` (r, d_in) and `b` (d_out, r)."""
    out = np.zeros((len(x), len(weight)), dtype=np.float64)
    for n in range(len(x)):
        low = [sum(float(a[k, i]) * float(x[n, i]) for i in range(x.shape[1])) for k in range(len(a))]
        for o in range(len(weight)):
            full = sum(float(weight[o, i]) * float(x[n, i]) for i in range(x.shape[1]))
            out[n, o] = full + float(bias[o]) + scaling * sum(float(b[o, k]) * low[k] for k in range(len(a)))
    return out
