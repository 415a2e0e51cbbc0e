"""FedAG's adapters, scores of synthetic images and server losses (Wang et al.), in loops and float64."""

import numpy as np


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def adapted(image: np.ndarray, w2, b2, w1, b1) -> np.ndarray:
    """Return the adapted features of an image, softmax(MLP1(tanh(MLP2(I)))) * I (Eq. 4)."""
    return softmax(w1 @ np.tanh(w2 @ image + b2) + b1) * image


def logits(image: np.ndarray, texts: np.ndarray, scale: float | None) -> np.ndarray:
    """Return the logits (classes,) of an image by Eq. 5, or its scaled cosines if `scale` is given."""
    found = []
    for text in texts:
        product = float((image * text).sum())
        if scale is not None:
            product *= scale / np.sqrt((image * image).sum()) / np.sqrt((text * text).sum())
        found.append(product)
    return np.array(found)


def scores(features: np.ndarray, labels: list[int], synthetic: np.ndarray, wanted: list[int]) -> list[float]:
    """Return each synthetic image's cosine with the mean feature of its class, at least 0 (Section 3.3)."""
    found = []
    for one, label in zip(synthetic, wanted, strict=True):
        own = [feature for feature, its in zip(features, labels, strict=True) if its == label]
        if not own:
            found.append(0.0)
            continue
        prototype = sum(own) / len(own)
        cosine = (one * prototype).sum() / np.sqrt((one * one).sum() * (prototype * prototype).sum())
        found.append(max(0.0, float(cosine)))
    return found


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """Return KL(p || q)."""
    return float(sum(a * (np.log(a) - np.log(b)) for a, b in zip(p, q, strict=True)))


def divergence(client: np.ndarray, server: np.ndarray, alpha: list[float]) -> float:
    """Return the mutual divergence J (Eq. 6) of a set of images from the logits (n, classes) of client and server."""
    total = 0.0
    for theta, phi, score in zip(map(softmax, client), map(softmax, server), alpha, strict=True):
        total += score * (kl(theta, phi) + kl(phi, theta))
    return total / (2 * sum(alpha))


def attention(phi: np.ndarray, w1, b1, w2, b2) -> tuple[np.ndarray, np.ndarray]:
    """Return logits eta (classes,) and attention beta (domains,) of an image (Eq. 8) from phi (domains, classes)."""
    raw = np.array([float((w2 @ np.maximum(w1 @ one + b1, 0) + b2)[0]) for one in phi])
    beta = softmax(raw)
    return sum(share * one for share, one in zip(beta, phi, strict=True)), beta


def regulariser(beta: np.ndarray, own: int, delta: float) -> float:
    """Return the margin loss R of one image (Eq. 9), given the attention `beta` and the place of its own domain."""
    others = [one for place, one in enumerate(beta) if place != own]
    return max(0.0, delta + max(others) - beta[own]) if others else 0.0


def cross_entropy(scores: np.ndarray, label: int) -> float:
    """Return the cross-entropy of one image from its logits `scores`."""
    return float(-np.log(softmax(scores)[label]))
