"""The launcher: torchrun's agent, the rendezvous and its store, restarts, forked ranks."""
