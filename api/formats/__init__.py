"""How answers look: a generation's deltas as whole answers and as the chunks of streams."""
