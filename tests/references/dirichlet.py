"""Dirichlet label skew by loops over examples, in plain Python, of the shares that are handed in."""


def cut(positions: list[int], shares: list[float]) -> list[list[int]]:
    """One class's examples, cut where the running sum of the shares says (Hsu, Qi and Brown, 2019)."""
    parts: list[list[int]] = []
    begin, total = 0, 0.0
    for number, share in enumerate(shares):
        total += share
        end = len(positions) if number == len(shares) - 1 else round(total * len(positions))
        parts.append(positions[begin:end])
        begin = end
    return parts
