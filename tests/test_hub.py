"""Models and data sets from the hub (infra/data/hub.py), with a stand-in for the hub that fails on
demand."""

import collections
import email.utils
import http.server
import io
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path
from unittest import mock

import pytest
from conftest import ROOT, arguments, run, run_to_end, until

from infra.data import hub

# For each line of stdin, this program forks one process per start of a run, since the hub's
# libraries keep what they have read. Waits are recorded and cut short.
STARTS = """
import json, os, sys, time, types
sys.path.insert(0, sys.argv[1])
import datasets, huggingface_hub
from infra.data import hub, questions
from infra.host import console
console.PROGRAM = "train.py"
# The server beside the hub, which may know the columns already, has another name to be resolved.
datasets.config.USE_PARQUET_EXPORT = False
really_sleep = time.sleep
for line in sys.stdin:
    children = json.loads(line)
    running = []
    for start in children:
        running.append(os.fork())
        if running[-1]:
            continue
        waits = []
        def sleep(seconds):
            waits.append(seconds)
            really_sleep(min(seconds, 0.01))
        time.sleep = sleep
        result = {"code": 0}
        sys.stderr = sys.stdout = open(start["log"], "w")
        try:
            cfg = types.SimpleNamespace(model=start["model"])
            result["files"] = hub.model_directory(cfg, "*.json")
            result["rows"] = [questions.load_rows(start["data"], held_out) for held_out in (0, 1)]
            result["weights"] = hub.model_directory(cfg, "*.safetensors")
        except SystemExit as e:
            result["code"] = e.code
        except BaseException:
            import traceback
            traceback.print_exc()
            result["code"] = 1
        result["waits"] = waits
        sys.stdout.flush()
        with open(start["result"], "w") as f:
            json.dump(result, f)
        os._exit(0)
    for child in running:
        os.waitpid(child, 0)
    print("done", flush=True)
"""
ROWS = {
    split: [{"question": f"{split} {i} + 1?", "answer": str(i + 1)} for i in range(n)]
    for split, n in (("train", 7), ("test", 3))
}
COMMIT = "c0" * 20
# Each download of the model begins with this request.
INFO = "GET /api/models/tiny/model/revision/main"


def none(*_):
    """No request has a fault."""


class Hub(http.server.ThreadingHTTPServer):
    """Serves a model tiny/model and a data set tiny/rows like the hub, with injected faults."""

    daemon_threads = True

    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {
            "models/tiny/model": {path.name: path.read_bytes() for path in model.iterdir()},
            "datasets/tiny/rows": {"README.md": b"---\nlicense: mit\n---\n"}
            | {
                f"data/{split}.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()
                for split, rows in ROWS.items()
            },
        }
        self.lock = threading.Lock()
        self.reset()

    def reset(self, fault_of=none):
        """fault_of(request line, number of earlier requests with this line): the fault, or None."""
        self.fault_of = fault_of
        self.asked = []
        # If set, requests for models wait for this event.
        self.hold = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            half = len(body) // 2
            self.wfile.write(body[:half] if self.fault == "half" else body)
            if self.fault == "half":
                self.drop()

    def drop(self):
        """Reset the connection."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        # The server flushes wfile afterwards, so give it a file that can be flushed.
        self.wfile = io.BytesIO()

    def serve(self):
        with self.server.lock:
            request = f"{self.command} {self.path}"
            self.fault = self.server.fault_of(request, self.server.asked.count(request))
            self.server.asked.append(request)
        if self.server.hold and "/api/models/" in self.path:
            self.server.hold.wait(60)
        length = int(self.headers.get("Content-Length", 0))
        wanted = json.loads(self.rfile.read(length)) if length else {}
        if self.fault == "drop":
            self.drop()
        elif isinstance(self.fault, tuple):
            self.answer(self.fault[0], b"no", self.fault[1])
        else:
            self.serve_repository(wanted)

    do_GET = do_HEAD = do_POST = serve

    def serve_repository(self, wanted):
        path, _, query = self.path.partition("?")
        api = re.fullmatch(r"/api/(\w+/[\w-]+/[\w-]+)(?:/([\w-]+)/[^/]+(?:/(.*))?)?", path)
        file = re.fullmatch(r"/(datasets/)?([\w-]+/[\w-]+)/resolve/[^/]+/(.+)", path)
        if path == "/":
            return self.answer(200, b"hub")
        if file:
            kind = file[1] or "models/"
            files = self.server.files.get(kind + file[2])
            if files is None:
                return self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
            if file[3] not in files:
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
                return self.answer(404, headers=headers)
            return self.serve_file(file[3], files[file[3]])
        files = api and self.server.files.get(api[1])
        if not files:
            return self.answer(404, headers={"X-Error-Code": "RepoNotFound"})
        entries = [self.entry(name, content) for name, content in files.items()]
        entries += [{"type": "directory", "path": "data", "oid": "d" * 40}]
        if api[2] == "tree":
            under = f"{api[3]}/" if api[3] else ""
            found = [entry for entry in entries if entry["path"].startswith(under)]
            if "recursive=true" not in query.lower():
                found = [e for e in found if "/" not in e["path"].removeprefix(under)]
            if not found:
                return self.answer(404, headers={"X-Error-Code": "EntryNotFound"})
        elif api[2] == "paths-info":
            found = [entry for entry in entries if entry["path"] in wanted["paths"]]
        else:
            siblings = [{"rfilename": name} for name in files]
            found = {"id": api[1].partition("/")[2], "sha": COMMIT, "siblings": siblings}
        self.answer(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def entry(self, name, content):
        return {"type": "file", "path": name, "size": len(content), "oid": etag(name)}

    def serve_file(self, name, content):
        headers = {"ETag": f'"{etag(name)}"', "X-Repo-Commit": COMMIT}
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked:
            first = int(asked[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            return self.answer(206, content[first:], headers)
        if self.command == "HEAD":
            headers["Content-Length"] = len(content)
        return self.answer(200, content, headers)


def etag(name):
    return name.encode().hex().ljust(40, "0")[-40:]


class Starts:
    """Starts runs against the hub."""

    def __init__(self, hub, directory):
        self.hub = hub
        self.directory = directory
        self.home = directory / "home"
        self.env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(self.home), "HF_HUB_OFFLINE": "0"}
        env = os.environ | self.env | {"JAX_PLATFORMS": "cpu"}
        # These variables of the machine could lead to another hub, or to copies outside `home`.
        for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN", "http_proxy", "HTTP_PROXY"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", STARTS, ROOT],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, count=1, model="tiny/model", data="tiny/rows", keep=False):
        if not keep:
            shutil.rmtree(self.home, ignore_errors=True)
        starts = []
        for i in range(count):
            files = {name: str(self.directory / f"{name}.{i}") for name in ("log", "result")}
            starts.append({"model": model, "data": data} | files)
        print(json.dumps(starts), file=self.process.stdin, flush=True)
        return starts

    def end(self, starts):
        """Wait for the starts. Returns {"code", "files", "rows", "weights", "waits", "log"} of
        each."""
        assert self.process.stdout.readline() == "done\n"
        results = []
        for start in starts:
            with open(start["result"]) as f:
                results.append(json.load(f) | {"log": Path(start["log"]).read_text()})
        return results

    def one(self, **how):
        (result,) = self.end(self.begin(**how))
        return result

    def check(self, result):
        """Assert that a start got all rows, and all files of the model, byte for byte."""
        assert result["code"] == 0, result
        assert result["rows"] == [ROWS["train"], ROWS["test"]], result
        assert result["files"] == result["weights"]
        for name, content in self.hub.files["models/tiny/model"].items():
            assert (Path(result["weights"]) / name).read_bytes() == content, name


@pytest.fixture(scope="module")
def starts(tiny_directory, tmp_path_factory):
    server = Hub(tiny_directory)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    starts = Starts(server, tmp_path_factory.mktemp("hub"))
    yield starts
    starts.process.kill()
    starts.process.wait()
    server.shutdown()
    server.server_close()


# ---------------------------------------------------------------- what is waited for
def test_a_wait_that_the_hub_asks_for_is_kept_and_reported(starts):
    """The fault is in the first request for a model, which the hub's libraries do not retry."""
    busy = (429, {"Retry-After": "9"})
    faults = {(INFO, 0): busy, (INFO, 1): (503, {})}
    starts.hub.reset(lambda *request: faults.get(request))
    result = starts.one()
    starts.check(result)
    assert result["waits"] == [9, hub.PATIENCE[1]]
    said = "train.py: the hub answers 429 Too Many Requests for tiny/model; trying again in 9 s\n"
    assert said in result["log"], result


@pytest.mark.parametrize("fault", ["drop", (503, {}), (429, {"Retry-After": "9999"})])
def test_patience_ends_after_minutes(fault, starts):
    starts.hub.reset(lambda *_: fault)
    result = starts.one()
    asked = [hub.LONGEST_WAIT] * 6 if fault[0] == 429 else list(hub.PATIENCE)
    assert result["waits"] == asked and sum(asked) > 300, result
    assert result["code"] == 2, result
    last = result["log"].strip().splitlines()[-1]
    reason = "drops the connection" if fault == "drop" else f"answers {fault[0]}"
    assert re.search(
        f"and the hub cannot provide the model: HubError: the hub {reason} .*, after 7 tries", last
    )


def gate(name):
    headers = {"X-Error-Code": "GatedRepo"}
    return lambda request, _: (403, headers) if name in request else None


@pytest.mark.parametrize(
    "names, fault_of, message",
    [
        (
            {"model": "no/model"},
            none,
            "and the hub cannot provide the model: RepositoryNotFoundError: 404",
        ),
        (
            {"model": "tiny/model"},
            gate("tiny/model"),
            "cannot provide the model: HubError: GatedRepoError: 403.* put HF_TOKEN=... into .env",
        ),
        ({"data": "tiny/rows"}, gate("tiny/rows"), "tiny/rows cannot be loaded.* put HF_TOKEN="),
        ({"data": "no/rows"}, none, "no/rows cannot be loaded: DatasetNotFoundError: .* doesn't"),
        ({"data": "tiny/rows:else"}, none, "cannot be loaded: ValueError: BuilderConfig 'else'"),
    ],
)
def test_what_the_hub_refuses_is_not_asked_again(names, fault_of, message, starts):
    starts.hub.reset(fault_of)
    result = starts.one(**names)
    assert (result["code"], result["waits"]) == (2, []), result
    assert re.search(message, result["log"].strip().splitlines()[-1]), result


def test_a_start_without_a_hub_uses_its_copies_at_once(starts, tmp_path):
    starts.hub.reset()
    starts.check(starts.one())
    program = (
        "import sys, time, types\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from infra.data import hub, questions\n"
        "def never(seconds): sys.exit(f'waited {seconds} s')\n"
        "time.sleep = never\n"
        "cfg = types.SimpleNamespace(model='tiny/model')\n"
        "found = hub.model_directory(cfg, '*.json'), hub.model_directory(cfg, '*.safetensors')\n"
        "print('loaded', found[0] == found[1], len(questions.load_rows('tiny/rows', False)))\n"
    )
    closed = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(starts.home)}
    command = (sys.executable, "-c", program)
    assert "loaded True 7" in run(*command, ROOT, HF_HUB_OFFLINE="0", **closed)
    # Without a copy, the start ends and names the cause.
    text = run(*command, ROOT, code=2, HF_HUB_OFFLINE="0", **closed | {"HF_HOME": str(tmp_path)})
    assert re.search(
        "no directory tiny/model .* provide the model; the hub cannot be reached .*refused", text
    )
    assert len(text.strip().splitlines()) == 1, text


@pytest.mark.parametrize(
    "headers, seconds",
    [
        ({}, 0),
        ({"Retry-After": "120"}, 120),
        ({"Retry-After": "soon"}, 0),
        ({"Retry-After": email.utils.formatdate(1060, usegmt=True)}, 60),
        ({"Retry-After": email.utils.formatdate(900, usegmt=True)}, 0),
        ({"RateLimit": '"api";r=0;t=55'}, 55),
        ({"RateLimit": '"api";r=10;t=55'}, 0),
    ],
)
def test_the_ways_to_ask_for_a_wait(headers, seconds, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000)
    assert hub.seconds_asked(headers) == seconds


def chained(error, cause):
    error.__cause__ = cause
    return error


STORE = RuntimeError("Task error: CAS Client Error: Request middleware error: error sending")


@pytest.mark.parametrize(
    "error, reason",
    [
        (chained(FileNotFoundError("no copy"), ConnectionResetError("reset")), "ResetError: reset"),
        (STORE, "the hub's store fails .RuntimeError: Task error"),
        (TimeoutError("too long"), "TimeoutError: too long"),
        (FileNotFoundError("no such file"), None),
        (OSError("No space left on device"), None),
        (ConnectionError("[SSL: CERTIFICATE_VERIFY_FAILED] unable to get issuer"), None),
    ],
)
def test_which_errors_are_faults_of_the_hub(error, reason, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    found = hub.fault(error)
    assert re.search(reason, found[0]) if reason else found is None, found
    # Offline, only copies are looked for, so there is nothing to wait for.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        with mock.patch.dict(os.environ, {name: "1"}):
            assert hub.fault(error) is None


# ---------------------------------------------------------------- who asks when
def test_the_processes_of_a_run_begin_to_ask_one_after_another():
    for count in (1, 2, 8, 64, 1000):
        begins = [hub.seconds_until_first(index, count) for index in range(count)]
        assert begins[0] == 0 and begins == sorted(set(begins)) and begins[-1] < 30
    assert hub.seconds_until_first(1, 8) == 0.5 and hub.seconds_until_first(63, 64) > 29


def test_processes_that_failed_together_do_not_ask_again_together(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    waits = {}
    for index in range(64):
        waited = waits[index] = []
        monkeypatch.setattr("time.sleep", waited.append)
        monkeypatch.setattr("jax.process_index", lambda index=index: index)
        monkeypatch.setattr("jax.process_count", lambda: 64)
        hub.reach.cache_clear()
        call = mock.Mock(side_effect=[ConnectionError("dropped"), ConnectionError("again"), "here"])
        with mock.patch.object(hub.urllib.request, "urlopen"):
            assert hub.ask("a/b", call, "not had") == "here"
    hub.reach.cache_clear()
    # Process 0 does not wait before it asks.
    assert waits[0] == [5, 10]
    first, second, third = zip(*[waits[index] for index in range(1, 64)], strict=True)
    for waited in (first, second, third):
        assert len(set(waited)) == 63
    assert min(first) > 0 and max(first) < 30
    assert min(second) > 5 and max(second) < 10


@pytest.mark.parametrize(
    "count, failures, waited, offline",
    [(1, 1, [], True), (4, 1, [5], False), (4, 4, [5, 10, 20], True)],
)
def test_in_a_run_of_many_a_failed_connection_is_tried_again(
    count, failures, waited, offline, monkeypatch, capsys
):
    """A name server may fail for a moment on one host. A process that is alone uses its copies at
    once instead."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr("jax.process_count", lambda: count)
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    fault = urllib.error.URLError("Temporary failure in name resolution")
    answers = [fault] * failures + [mock.Mock()]
    hub.reach.cache_clear()
    with mock.patch.object(hub.urllib.request, "urlopen", side_effect=answers):
        reason = hub.reach()
    hub.reach.cache_clear()
    assert waits == waited and hub.is_offline() == offline
    assert ("in name resolution" in reason) == offline, reason
    assert capsys.readouterr().err.count("set HF_HUB_OFFLINE=1") == len(waited)


def test_one_of_the_processes_on_a_disk_asks_and_the_others_find_its_copy(starts):
    starts.hub.reset()
    starts.hub.hold = threading.Event()
    running = starts.begin(count=4)
    until(lambda: starts.hub.asked.count("GET /") == 4 and INFO in starts.hub.asked)
    starts.hub.hold.set()
    results = starts.end(running)
    for result in results:
        starts.check(result)
        # Shorter waits are for locks of the hub's libraries.
        assert max(result["waits"], default=0) < 1
    counts = collections.Counter(starts.hub.asked)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        for method in ("HEAD", "GET"):
            assert counts[f"{method} /tiny/model/resolve/{COMMIT}/{name}"] == 1, counts
    (tree,) = (asked for asked in counts if "/api/models/tiny/model/tree/" in asked)
    assert counts[tree] == 1 and counts[INFO] == 8, counts


def run_two(starts, tmp_path, monkeypatch, code=0):
    """Run two processes that share a disk without copies. Returns what they print."""
    for name, value in starts.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    flags = (
        "--model tiny/model --data tiny/rows --eval_data none --max_prompt 99 --max_answer 8 "
        "--npq 4 --minibatches 1 --sft_steps 0 --steps 1 --save_every 0 --entropy_bonus 0.1"
    )
    return run_to_end(tmp_path / "run", arguments([flags]), processes=2, code=code)


@pytest.mark.slow
def test_a_run_of_two_processes_starts_from_the_hub(starts, tmp_path, monkeypatch):
    busy = (429, {"Retry-After": "1"})
    starts.hub.reset(lambda *request: busy if request == (INFO, 0) else None)
    text = run_two(starts, tmp_path, monkeypatch)
    assert text.count("answers 429 Too Many Requests for tiny/model; trying again in") == 1, text
    assert (tmp_path / "run/final/model.safetensors").exists()
    assert sum("/resolve/" in asked and ".safetensors" in asked for asked in starts.hub.asked) == 2


@pytest.mark.slow
def test_all_processes_end_if_one_gets_no_data(starts, tmp_path, monkeypatch):
    readme = "HEAD /datasets/tiny/rows/resolve/main/README.md"
    refusal = (404, {"X-Error-Code": "RepoNotFound"})
    starts.hub.reset(lambda *request: refusal if request == (readme, 0) else None)
    text = run_two(starts, tmp_path, monkeypatch, code=2)
    assert text.count("tiny/rows cannot be loaded: DatasetNotFoundError") == 1, text
    assert re.search("train.py: not all processes have tiny/rows: process [01] says why", text), (
        text
    )


# ---------------------------------------------------------------- every request, every fault
FAULTS = {
    "429 with Retry-After": (lambda request: 1, (429, {"Retry-After": "1"})),
    "503 twice": (lambda request: 2, (503, {})),
    # The hub's libraries try up to six times themselves, and seven times for HEAD of a file.
    "503 for longer": (lambda request: 7 if request.startswith("HEAD") else 6, (503, {})),
    "a dropped connection": (lambda request: 1, "drop"),
    "half an answer": (lambda request: 1, "half"),
}


# "503 for longer" goes through all that "503 twice" does.
SOAK = pytest.param("503 twice", marks=pytest.mark.soak)


@pytest.mark.slow
@pytest.mark.parametrize("name", [SOAK, *(name for name in FAULTS if name != "503 twice")])
def test_a_start_survives_a_fault_of_the_hub_at_any_request(name, starts, record_property):
    times, fault = FAULTS[name]
    starts.hub.reset()
    starts.check(starts.one())
    calm = starts.hub.asked
    assert len(calm) > 20, calm
    for i, request in enumerate(calm):
        faulty = range(calm[:i].count(request), calm[:i].count(request) + times(request))
        met = []

        def fault_of(asked, before, request=request, faulty=faulty, met=met):
            if asked == request and before in faulty:
                met.append(before)
                return fault
            return None

        starts.hub.reset(fault_of)
        starts.check(starts.one())
        assert met, (i, request)
    record_property(name, f"at each of {len(calm)} requests of a start")
