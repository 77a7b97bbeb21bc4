"""`llaisys route`: an HTTP router in front of servers on this or other machines.

`prompts` finds the prompt and conversation of a request, `server/replicas/router` chooses the
replica, `common/http_client` exchanges messages with it. A router has no state that another one
needs: several processes may share an address (`--reuse-port`).
"""
