"""The two apps that execute a recipe on Flower, and the deployments they run in."""
