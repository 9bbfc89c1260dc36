"""Workloads: ``trace`` reads them, ``shape`` fits them to a machine and makes their prompts."""
