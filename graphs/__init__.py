"""The shipped graphs: wiring that reads as a diagram, and a YAML file each."""
