"""Carries out planned steps on SGLang's queues, batches and KV; what was admitted is a result."""
