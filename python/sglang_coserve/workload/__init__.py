"""Workloads: ``trace`` reads them, ``shape`` fits them to a machine, ``synthetic`` has prompts."""
