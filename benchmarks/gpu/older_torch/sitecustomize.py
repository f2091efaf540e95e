"""What a torch older than rayembed's lacks, put in when its modules are imported.

Before 2.13 the kernel of unpadded attention takes fewer key heads by itself, and has no argument
that says so; two collectives had other names.
"""

import functools
import importlib.abc
import importlib.util
import inspect
import sys


def _with_enable_gqa(module):
    original = module.varlen_attn
    if "enable_gqa" not in inspect.signature(original).parameters:

        @functools.wraps(original)
        def varlen_attn(*given, enable_gqa=False, **named):
            return original(*given, **named)

        module.varlen_attn = varlen_attn


def _with_single_collectives(module):
    for name, older in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    ):
        if not hasattr(module, name):
            setattr(module, name, getattr(module, older))


_CHANGES = {
    "torch.nn.attention.varlen": _with_enable_gqa,
    "torch.distributed": _with_single_collectives,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, change):
        self._loader, self._change = loader, change

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._change(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        change = _CHANGES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, change)
        return spec


sys.meta_path.insert(0, _Finder())
