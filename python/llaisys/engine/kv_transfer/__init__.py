"""KV transfer: an engine that has computed a prompt sends its KV blocks to an engine that decodes.

    producer                                      consumer
    core.add_requests (Request.kv_export)
    prefill; KvTransfer.publish: save the
    blocks to host slots and lock them
                                                  core.add_requests (Request.kv_source)
                                                  KvTransfer.add: reserve host slots
    KvServer, a thread per connection  <--Fetch-- KvClient, a thread per producer
                                       --Found--> copies the blocks to the reserved slots
    KvTransfer.poll: unlock            <--Done---
                                                  KvTransfer.poll: add the prefix nodes; the request
                                                  is queued and restores them as offloaded blocks

The prefix cache is the only state: blocks are found by their tokens, and the consumer computes what
it does not receive. A failed transfer costs time, never the request.

`connection` is a socket with its messages. Another transport, such as
NIXL or UCX, implements `KvClient.fetch` and the sending half of `KvServer`.
"""
