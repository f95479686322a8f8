"""`python -m fedfactor`: the command line."""

from fedfactor.cli import main

if __name__ == "__main__":
    main()
