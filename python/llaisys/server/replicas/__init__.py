"""Several engine processes with the same model behind one server.

`router` decides where a prompt goes, `replica_set` is what the API process has instead of one
engine's link: it starts the engines, sends each request to one of them, and brings back one that
died.
"""
