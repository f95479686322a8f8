"""Speed and memory figures; `make bench` prints one JSON line a figure."""
