"""Predict live buffers and bytes of a run before it is launched."""

import sys

from mlxstacks import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
