"""Fused operations for GPUs: one file an operation, with its plain PyTorch reference and the conditions for its use.

The Triton sources are in `gpu/`. They are imported at the first launch, because importing Triton is slow and some systems do not have it.
"""
