"""Data parallel replicas: several engine processes with the same model behind one server.

`router` chooses the replica of a prompt. `replica_set` replaces the link to a single engine: it
starts the engines, routes requests and restarts dead replicas.
"""
