"""The servers' processes under a name that a work tree and a wheel share: ``python -m hacrl.serve prefect``."""

from flows.servers.serve import main

if __name__ == "__main__":
    main()
