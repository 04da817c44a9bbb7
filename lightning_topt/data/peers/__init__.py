"""A cache partitioned over nodes: the client, the server, and what they say to each other."""
