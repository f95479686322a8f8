"""Pure mathematics of one weight: how to write it as factors, and back."""
