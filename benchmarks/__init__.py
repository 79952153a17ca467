"""Side-by-side measurements against the stock engine and peers; every one runs as `python -m benchmarks.<name>`."""
