"""A scheduler whose steps are suspended on purpose."""
