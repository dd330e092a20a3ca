"""Checkpoints of Hugging Face and of Megatron, read and written without either; streaming, no GPU."""
