"""What a torch older than rayembed's lacks, put in when its module is imported.

Before 2.13 the kernel of unpadded attention takes fewer key heads by itself, and has no argument
that says so.
"""

import functools
import importlib.abc
import importlib.util
import inspect
import sys

_MODULE = "torch.nn.attention.varlen"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        original = module.varlen_attn
        if "enable_gqa" not in inspect.signature(original).parameters:

            @functools.wraps(original)
            def varlen_attn(*given, enable_gqa=False, **named):
                return original(*given, **named)

            module.varlen_attn = varlen_attn


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
