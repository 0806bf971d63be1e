"""Everything behind `dynamo serve`: the graph, its configuration, its processes, the command line."""
