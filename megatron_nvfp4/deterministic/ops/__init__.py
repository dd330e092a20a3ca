"""The deterministic operators: one file each, the formula in torch, its CUDA kernel called where
tensors are CUDA's.

On the CPU an operator computes the same formula with the same roundings; sums are added in torch's
order, so last bits of a sum may differ from the GPU's. Every operator has a backward of fixed order.
"""
