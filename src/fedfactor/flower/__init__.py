"""The same recipe on Flower: a thin app around `engines/flower.py` on the server and `client.work` on the nodes."""
