"""The allowance on a queue with one server."""
