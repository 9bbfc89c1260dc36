"""Keeps one client's request from stopping the server, or its event loop, for the others.

Of SGLang, and of nothing else of co-serving. ``install`` puts it in place.
"""
