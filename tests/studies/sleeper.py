"""A child that says who it is and then sleeps; for tests of `children`."""

import os
import time
from pathlib import Path

from mlxstacks.study.child_process import as_child

if __name__ == "__main__":
    specification, send = as_child()
    print("what is printed goes to the log", flush=True)
    partial = Path(specification["pid_file"] + ".partial")
    partial.write_text(str(os.getpid()))
    partial.rename(specification["pid_file"])
    send({"pid": os.getpid()})
    time.sleep(60)
