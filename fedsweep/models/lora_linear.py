"""PEFT's linear layer with LoRA, with the same results but in less time."""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn

from fedsweep.models.sessions import DropoutMasks, Segment, Session

NARROW = 192
"""The largest harmonic mean of a layer's two widths at which one dense gradient is faster than LoRA's skinny products.

Measured on a CPU for widths from 64 to 3072, ranks from 1 to 32 and 136 to 1576 tokens: at 64 x 64, a training step of
the layer takes 0.51 to 0.83 of the time, at 192 x 192 0.75 to 1.1, and at 768 x 192 and above 1.0 to 1.4.
"""


class LoraLinear(Linear):
    """A linear layer with LoRA, y = W x + s B A x, that chooses the order of its products by their cost.

    - Without gradients, y = (W + s B A) x: one product for all tokens.
    - If the layer is narrow and LoRA has no dropout, training computes the same. The gradient of W + s B A is one dense
      product, and its projections on A and B are small.
    - Otherwise, B (A x) is added to W x in one operation.

    The buffer `folded` (out, in), if there is one, is the change that the server folded into W (`add_folds`).

    If `session.segments` is not empty, the tokens belong to several clients, and each client's factors are applied to
    the client's own tokens.
    """

    name: str
    """The layer's name in the model."""
    session: Session

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs (..., out) for the inputs (..., in)."""
        own = cast(Tensor, self.lora_A["default"].weight), cast(Tensor, self.lora_B["default"].weight)
        if segments := self.session.segments:
            return self._of_clients(x, segments, own)
        return self._of_one(x, *own, self.session.masks, self.scaling["default"])

    def _of_one(self, x: Tensor, a: Tensor, b: Tensor, masks: DropoutMasks | None, scaling: float) -> Tensor:
        if self._merges(x):
            weight, bias = self._frozen()
            return F.linear(x, torch.addmm(weight, b, a, alpha=scaling), bias)
        plain = self._plain(x)
        low = F.linear(self._dropped(x, masks), a)
        return torch.addmm(plain.flatten(0, -2), low.flatten(0, -2), b.T, alpha=scaling).view_as(plain)

    def _of_clients(self, x: Tensor, segments: Sequence[Segment], own: tuple[Tensor, Tensor]) -> Tensor:
        names = (f"{self.name}.lora_{factor}.default.weight" for factor in "AB")
        a, b = ([one.tensors.get(name, part) for one in segments] for name, part in zip(names, own, strict=True))
        scaling, sizes = self.scaling["default"], [one.images for one in segments]
        scalings = [scaling if one.scaling is None else one.scaling for one in segments]
        ranked = [one for one in segments if one.scaling is not None]
        if ranked:  # an A that is not trained is whole
            a = [its_a[: its_b.shape[1]] for its_a, its_b in zip(a, b, strict=True)]
        parts = torch.split(x, sizes)
        if len(set(sizes)) > 1:
            owners = zip(parts, a, b, segments, scalings, strict=True)
            return torch.cat([self._of_one(part, ia, ib, one.masks, s) for part, ia, ib, one, s in owners])
        clients = len(segments)
        left, right = (_stacked(b, 1), _stacked(a, 0)) if ranked else (torch.stack(b), torch.stack(a))
        if len(set(scalings)) > 1:
            left, scaling = left * torch.tensor(scalings, dtype=x.dtype, device=x.device).view(-1, 1, 1), 1.0
        else:
            scaling = scalings[0]
        if self._merges(x):
            weight, bias = self._frozen()
            merged = torch.baddbmm(weight.expand(clients, *weight.shape), left, right, alpha=scaling)
            rows = x.reshape(clients, -1, x.shape[-1])
            added = torch.bmm(rows, merged.mT) if bias is None else torch.baddbmm(bias, rows, merged.mT)
            return added.view(*x.shape[:-1], -1)
        plain = self._plain(x)
        dropped = x
        if self._rate:
            dropped = torch.cat([self._dropped(part, one.masks) for part, one in zip(parts, segments, strict=True)])
        low = torch.bmm(dropped.reshape(clients, -1, x.shape[-1]), right.mT)
        return torch.baddbmm(plain.view(clients, -1, plain.shape[-1]), low, left.mT, alpha=scaling).view_as(plain)

    def _plain(self, x: Tensor) -> Tensor:
        """Return the output of the frozen layer, (W + folded) x + b.

        Autocast would round the sum W + folded, which would lose small changes. Then the two products are added.
        """
        base, folded = cast(nn.Linear, self.base_layer), self._buffers.get("folded")
        if folded is None or not _autocast():
            return F.linear(x, *self._frozen())
        plain = F.linear(x, base.weight, base.bias)
        return torch.addmm(plain.flatten(0, -2), x.flatten(0, -2), folded.T).view_as(plain)

    def _frozen(self) -> tuple[Tensor, Tensor | None]:
        base, folded = cast(nn.Linear, self.base_layer), self._buffers.get("folded")
        return (base.weight if folded is None else base.weight + folded), base.bias

    def _merges(self, x: Tensor) -> bool:
        """Return whether W + s B A is formed; not under autocast, whose rounding of the sum would lose B A."""
        if self._rate or _autocast():
            return False
        out, width = cast(nn.Linear, self.base_layer).weight.shape
        return not torch.is_grad_enabled() or (x.is_cpu and 2 * out * width <= NARROW * (out + width))

    @property
    def _rate(self) -> float:
        return getattr(self.lora_dropout["default"], "p", 0.0) if self.training else 0.0

    def _dropped(self, x: Tensor, masks: DropoutMasks | None) -> Tensor:
        return dropped(x, rate, masks) if (rate := self._rate) else x


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _stacked(factors: Sequence[Tensor], dim: int) -> Tensor:
    """Stack the clients' factors A (dimension 0) or B (dimension 1), after padding the smaller ranks with zeros."""
    rank = max(factor.shape[dim] for factor in factors)
    pads = [(0, 0) * (1 - dim) + (0, rank - factor.shape[dim]) for factor in factors]
    return torch.stack([F.pad(one, pad) if pad[-1] else one for one, pad in zip(factors, pads, strict=True)])


class SessionDropout(nn.Module):
    """Dropout with the masks of the client that trains alone, for PEFT's other layers, such as convolutions."""

    def __init__(self, rate: float, session: Session) -> None:
        super().__init__()
        self.p, self.session = rate, session

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with some entries set to 0 and the others scaled up; outside of training, the input."""
        return dropped(x, self.p, self.session.masks) if self.training else x


def dropped(x: Tensor, rate: float, masks: DropoutMasks | None) -> Tensor:
    """Apply dropout to `x`, with the next mask of a client's stream, or of torch's global generator for None."""
    return F.dropout(x, rate) if masks is None else x * masks.next(x, rate)
