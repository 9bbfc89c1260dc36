"""Which of our files a request runs through."""
