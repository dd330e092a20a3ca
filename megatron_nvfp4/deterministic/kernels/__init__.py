"""Triton kernels of the deterministic operators, for compute capability 9.0; imported where a CUDA
tensor is met.

Block sizes, numbers of warps and the width of a load fix the order in which a block adds, so they
belong to the numerics: another value gives other last bits. What each adds in which order stands with
its operator in ../ops.
"""
