"""The Batch API over HTTP: FastAPI routes without an engine, of the main house."""
