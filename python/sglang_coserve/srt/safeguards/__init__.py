"""Keeps one client's request from stopping the server, or its event loop, for the others."""
