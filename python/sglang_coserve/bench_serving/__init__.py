"""SGLang's ``bench_serving`` twice at once: an online and an offline load, on servers in turn."""
