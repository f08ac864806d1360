"""Loraplex: one quantized base model, thousands of tenants' LoRA adapters, every batch mixed."""

from .platform.version import __version__ as __version__
