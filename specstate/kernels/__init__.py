"""Kernels and their launchers. Nothing in here knows the manager, a request or a handle: rows in, tensors out."""
