"""HTTP as our servers speak it: middlewares, routes, errors and keys."""
