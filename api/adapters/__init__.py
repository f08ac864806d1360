"""The life of an adapter version, from upload to deletion, without HTTP."""
