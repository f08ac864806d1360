"""Function calling: how tools are presented to the model, and how its calls are parsed."""
