"""Kernels, one folder an operation: ``reference.py`` (torch, the truth) beside ``triton.py`` where there is one."""
