"""Commands that keep the course: check the machine, run the tests, record, build the site, serve the demo."""
