"""A durable Batch API for one engine, as OpenAI's clients know it.

``BatchService`` is all of it but HTTP. It sees the engine through ``Backend`` and keeps
everything in one directory:

- ``service`` is what the routes call; ``schemas`` are the objects that it takes and gives.
- ``state`` is the life of a batch as a pure function; ``job_driver`` does what a state
  calls for, ``job_lines`` has the line engine (``lines``) serve the lines of a batch.
- ``store`` keeps the rows of files and batches in SQLite. Records of lines are in the
  append-only files of ``lines``.
- ``eta`` says when a batch will be complete.
- ``api`` puts routes and annexes together. Annexes are optional folders: ``uploads`` takes files
  in parts, ``webhooks`` delivers the ends of batches, ``responses`` makes a batch of one line of a
  request that is answered in the background.
"""
