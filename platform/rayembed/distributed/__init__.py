"""Differentiable collectives and GradCache: the only importer of torch.distributed."""
