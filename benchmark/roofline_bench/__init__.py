"""Published step times, and what the roofline predicts for them."""
