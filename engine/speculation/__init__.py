"""Speculative decoding: tokens are drafted, verified in the step that would have run anyway, and
only those are kept that plain decoding would have drawn."""
