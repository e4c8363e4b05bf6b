"""The command `jaxlm`, outside of the package: importing that brings JAX, and Ctrl-C is to be heeded meanwhile."""


def main() -> int:
    try:
        from jaxlm.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130
