"""The processes of a graph, one file each: what it is called, how it is configured, how it is started."""
