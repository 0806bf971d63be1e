"""The games of the paper as arithmetic: arrays in, numbers out, no state and no I/O."""
