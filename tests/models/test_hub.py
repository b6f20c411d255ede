"""`load` takes names of the Hugging Face Hub: a server on this machine stands for it."""

import hashlib
import http.server
import json
import re
import shutil
import sys
import threading

import numpy as np
import pytest

import jgg.hf
import jgg.models
from jgg.hf import hub
from tests.support.models import DATA

constants = pytest.importorskip("huggingface_hub.constants")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY, FETCHED = "org/tiny", {"config.json", "model.safetensors", "tokenizer.json"}


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub that downloads ask for: org/tiny of the server's folder, and org/gated."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path, _, _ = self.path.partition("?")
        self.server.asked.append(path)
        files = {str(file.relative_to(self.server.folder)): file for file in self.server.folder.rglob("*.*")}
        if path == f"/api/models/{TINY}" or path.startswith(f"/api/models/{TINY}/revision/main"):
            self.answer({"id": TINY, "sha": COMMIT, "siblings": []})
        elif path == f"/api/models/{TINY}/tree/{COMMIT}":
            self.answer(
                [
                    {"type": "file", "path": name, "size": file.stat().st_size, "oid": self.tag(file)}
                    for name, file in files.items()
                ]
            )
        elif path.startswith(f"/{TINY}/resolve/{COMMIT}/"):
            self.answer(files[path.removeprefix(f"/{TINY}/resolve/{COMMIT}/")])
        elif "org/gated" in path:
            self.refuse(403, "GatedRepo")
        elif f"/api/models/{TINY}/revision/" in path:
            self.refuse(404, "RevisionNotFound")
        else:
            self.refuse(401, "RepoNotFound")

    def tag(self, file):
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def answer(self, content):
        is_file = not isinstance(content, dict | list)
        body = content.read_bytes() if is_file else json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/octet-stream" if is_file else "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        if is_file:
            self.send_header("ETag", f'"{self.tag(content)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        """Prints nothing."""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The Hub for huggingface_hub in this process, with an empty cache."""
    folder = shutil.copytree(DATA / "qwen3_moe", tmp_path / "repository")
    (folder / "original").mkdir()
    (folder / "tokenizer.json").write_text("{}")
    for name in ("original/model.safetensors", "pytorch_model.bin", "consolidated.00.safetensors", "README.md"):
        (folder / name).write_text("not fetched")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.folder, server.asked = folder, []
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        template = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.chdir(tmp_path)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_name_is_fetched_once_and_found_without_network(server, tmp_path, monkeypatch):
    model = jgg.models.load(TINY)
    expected = jgg.models.load(DATA / "qwen3_moe")
    np.testing.assert_array_equal(model.w_embedding[...], expected.w_embedding[...])
    assert model.config.name == TINY
    folder = jgg.hf.download(TINY)
    assert {path.name for path in folder.iterdir()} == FETCHED
    fetched = [path for path in server.asked if "/resolve/" in path]
    assert {path.rpartition("/")[2] for path in fetched} == FETCHED
    jgg.models.save(model, tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == FETCHED
    server.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert jgg.hf.download(TINY) == folder
    assert not server.asked


def test_a_folder_of_this_path_comes_first(server, tmp_path):
    shutil.copytree(DATA / "mixtral", tmp_path / TINY)
    assert jgg.models.load(TINY).config.model_type == "mixtral"
    assert not server.asked


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("org/unknown", FileNotFoundError, "org/unknown must be a folder here or a model of the Hugging Face Hub"),
        ("org/gated", PermissionError, "org/gated is gated: ask for access at https://huggingface.co/org/gated"),
    ],
)
def test_what_the_hub_refuses_is_said(name, kind, message, server):
    with pytest.raises(kind, match=re.escape(message)):
        jgg.models.load(name)


def test_a_revision_is_fetched_or_named(server):
    assert jgg.hf.download(TINY, revision="main").name == COMMIT
    with pytest.raises(FileNotFoundError, match="revision of org/tiny must be one of the Hub, got 'v9'"):
        jgg.hf.download(TINY, revision="v9")


def test_without_network_it_is_said(server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="org/tiny is no folder here, is not whole in the Hub's cache"):
        jgg.models.load(TINY)


def test_a_package_or_name_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "org/tiny/more", "/org/tiny", "../tiny", None):
        with pytest.raises(ValueError, match=re.escape(f"name must be 'owner/model', got {name!r}")):
            jgg.hf.download(name)
    with pytest.raises(FileNotFoundError, match=r"path must be a folder .*, got \.\./tiny\. jgg\.hf\.download\(NAME\)"):
        jgg.models.load("../tiny")
    assert hub.folder_of("one") == tmp_path.__class__("one")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"org/tiny needs huggingface_hub to be fetched: pip install 'jgg\[train\]'"):
        jgg.models.load("org/tiny")
