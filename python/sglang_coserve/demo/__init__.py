"""The demo: an online trace and an offline file on one server, measured from outside."""
