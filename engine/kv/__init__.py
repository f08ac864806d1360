"""The paged KV cache: blocks, prefix cache, swap space and the device's tensors."""
