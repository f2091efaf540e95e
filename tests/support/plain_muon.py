"""Muon written with singular values: the iteration is a polynomial of each of them."""

import math

import torch


def plain_direction(momentum, iterations=5):
    """What Muon moves a matrix along: Newton-Schulz by way of the decomposition, in float64."""
    u, values, v = torch.linalg.svd(momentum.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(iterations):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    size = 0.2 * math.sqrt(max(momentum.shape))
    return (size * (u * values) @ v).to(momentum.dtype)


class PlainMuon:
    """Muon over whole matrices in one process."""

    def __init__(self, matrices, *, weight_decay, momentum=0.95):
        self.matrices, self.weight_decay, self.momentum = list(matrices), weight_decay, momentum
        self.buffers = [torch.zeros_like(p) for p in self.matrices]

    @torch.no_grad()
    def step(self, rate):
        for p, buffer in zip(self.matrices, self.buffers, strict=True):
            buffer.mul_(self.momentum).add_(p.grad, alpha=1 - self.momentum)
            nesterov = (1 - self.momentum) * p.grad + self.momentum * buffer
            p.mul_(1 - rate * self.weight_decay).sub_(rate * plain_direction(nesterov))
