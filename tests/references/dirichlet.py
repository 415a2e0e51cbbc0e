"""The division of one class by the shares of Dirichlet label skew, in loops over examples in plain Python."""


def cut(positions: list[int], shares: list[float]) -> list[list[int]]:
    """Divide the examples of one class at the cumulative sums of the shares (Hsu, Qi and Brown, 2019)."""
    parts: list[list[int]] = []
    begin, total = 0, 0.0
    for number, share in enumerate(shares):
        total += share
        end = len(positions) if number == len(shares) - 1 else round(total * len(positions))
        parts.append(positions[begin:end])
        begin = end
    return parts
