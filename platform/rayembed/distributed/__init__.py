"""Differentiable collectives and GradCache: the only package that imports torch.distributed."""
