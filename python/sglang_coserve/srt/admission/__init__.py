"""Who is admitted when: by the plans of ``core.scheduler``, or without any."""
