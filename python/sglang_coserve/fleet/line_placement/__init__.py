"""Which engine of a fleet gets which line of a batch, and when. Sans I/O.

Lines whose prompts begin alike go to one engine, as far as its window allows: there the
prefix is computed once. Which engine that is follows from the prefix alone (rendezvous
hashing), so another gateway, or the same one after a restart, finds the same.
"""
