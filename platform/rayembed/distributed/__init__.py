"""Collectives with gradient and GradCache: the only importer of torch.distributed."""
