"""Requests that no server should be harmed by, and a server that has to answer them all."""
