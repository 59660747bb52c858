"""`python -m swarm`, the same as the command `swarm`."""

from swarm.cli.app import program

if __name__ == "__main__":
    program()
