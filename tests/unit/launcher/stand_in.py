"""A small server in place of vLLM's: answers /health, has children, ends when told to.

Usage: stand_in.py PORT PIDS_FILE [OPTION...]; imports little, since many are started.
"""

import os
import signal
import socket
import subprocess
import sys

port, pids_file, *options = sys.argv[1:]


def note(pid: int) -> None:
    with open(pids_file, "a") as file:
        print(pid, file=file)


print(f"serving on {port}", flush=True)
if "fail" in options or any(os.path.exists(o[10:]) for o in options if o[:10] == "fail-when:"):
    print("no such weights", file=sys.stderr, flush=True)
    sys.exit(3)
# A worker in the process group and one in a session of its own; both ignore SIGTERM.
for is_own_session in (False, True):
    command = ["sh", "-c", "trap '' TERM; sleep 600"]
    note(subprocess.Popen(command, start_new_session=is_own_session).pid)
note(os.getpid())


def on_sigterm(*_: object) -> None:
    print("stopping", flush=True)
    os._exit(0)


signal.signal(signal.SIGTERM, signal.SIG_IGN if "ignore-sigterm" in options else on_sigterm)
listener = socket.create_server(("127.0.0.1", int(port)))
while True:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        status = "503 Loading" if "never-healthy" in options else "200 OK"
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
