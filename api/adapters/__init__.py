"""An adapter version from upload to deletion, without HTTP."""
