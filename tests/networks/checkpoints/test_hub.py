"""Names of the Hugging Face Hub are downloaded from a small local server, and read offline from the cache."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants as hub
import pytest
import timm
import torch
from small_networks import assert_same, randomize_
from torch import nn

import vision_attn as va
from vision_attn.cli import main
from vision_attn.networks.checkpoints.hub import resolve_source
from vision_attn.recipes.settings import Settings
from vision_attn.recipes.train import build_network

COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a repository with a network, its adapter, and a pickle, and return its folder."""
    folder, model = tmp_path_factory.mktemp("hub") / "net", timm.create_model("tiny", num_classes=3)
    va.insert_(model, names="layer2", num_heads=4, example_input=(1, 3, 32, 32))
    va.save_model(randomize_(model).eval(), folder, classes=["a", "b", "c"])
    va.save_adapter(model, folder / "adapter.safetensors")
    torch.save(model.state_dict(), folder / "net.pth")
    return folder


@pytest.fixture
def requests(folder, tmp_path, monkeypatch):
    """Serve the folder as user/net, and return the paths of the requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            kind, _, rest = self.path.partition("?")[0].removeprefix("/").partition("user/net/")
            parts, content = rest.split("/"), None
            if kind == "api/models/":
                listed = {"type": "file", "size": 1, "oid": ""}
                files = [{"rfilename": file.name, "path": file.name, **listed} for file in folder.iterdir()]
                answer = files if parts[0] == "tree" else {"id": "user/net", "sha": COMMIT, "siblings": files}
                content = json.dumps(answer).encode()
            elif (kind, parts[0]) == ("", "resolve") and (folder / parts[-1]).is_file():
                content = (folder / parts[-1]).read_bytes()
            self.send_response(200 if content is not None else 404)
            self.send_header("ETag", f'"{parts[-1]}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content or b"")

        do_HEAD = do_GET  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(hub, "ENDPOINT", endpoint)
    monkeypatch.setattr(hub, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield requests
    server.shutdown()
    server.server_close()


def test_a_network_is_loaded_without_other_files_and_again_offline(folder, requests, monkeypatch, capsys, image_folder):
    expected, names = va.load_model(folder), ("hf-hub:user/net", "hf-hub:user/net@main")
    for name in names:
        assert_same(va.load_model(name).state_dict(), expected.state_dict())
    assert not [path for path in requests if path.endswith((".pth", ".md"))]
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    del requests[:]
    assert va.load_model(names[0]).classes == ("a", "b", "c")
    image = str(image_folder / "val" / "red" / "0.png")
    assert main(["predict", names[0], image, "--top", "1"]) == 0
    assert main(["explore", names[0], image, "-o", str(folder.parent / "page.html")]) == 0
    assert "random" not in capsys.readouterr().out
    bare = timm.create_model("tiny", num_classes=3)
    bare.load_state_dict({key: value for key, value in expected.state_dict().items() if "inserted" not in key})
    va.load_adapter_(bare, "hf-hub:user/net/adapter.safetensors")
    assert_same(dict(sorted(bare.state_dict().items())), dict(sorted(expected.state_dict().items())))
    assert requests == []
    unreadable = r"hf-hub:user/other cannot be read from the Hugging Face Hub \("
    with pytest.raises(va.errors.CheckpointError, match=unreadable):
        va.load_model("hf-hub:user/other")


def test_a_file_is_loaded_at_a_revision(folder, requests, monkeypatch):
    model = va.load_model(folder)
    randomize_(model)
    assert va.load_checkpoint_(model, "hf-hub:user/net@v1/net.pth").loaded
    assert_same(model.state_dict(), va.load_model(folder).state_dict())
    assert any(path.endswith("/v1/net.pth") for path in requests)
    assert va.load_checkpoint_(model, "hf-hub:user/net@refs/pr/1/net.pth").loaded
    assert any(path.endswith("/refs%2Fpr%2F1/net.pth") for path in requests)
    with pytest.raises(va.errors.CheckpointError, match=r"user/net/missing.pth cannot be read"):
        va.load_checkpoint_(model, "hf-hub:user/net/missing.pth")
    monkeypatch.setattr("vision_attn.networks.checkpoints.hub.PATTERNS", ["*.json"])
    missing = r"contains no \.safetensors file.* hf-hub:user/net/pytorch_model.bin"
    with pytest.raises(va.errors.CheckpointError, match=missing):
        va.load_checkpoint_(model, "hf-hub:user/net")


def test_training_starts_from_weights_of_the_hub_with_a_new_classifier_for_other_classes(folder, requests):
    options = {"img_size": 32, "names": ("layer2",), "block_options": ("num_heads=4",), "reset_head": True}
    given = Settings(model="tiny", weights="hf-hub:user/net", **options)
    model, new_head = build_network(given, "abcde", None, lambda line: None, resumed=False)
    state, expected = model.state_dict(), va.load_model(folder).state_dict()
    assert new_head == ["fc.*"]
    assert not state.pop("fc.weight").any()
    assert state.pop("fc.bias").shape == (5,)
    assert_same(state, {key: expected[key] for key in state})


@pytest.mark.parametrize("name", ["net", "user/net@", "user/../net", "", "user/net@refs/pr"])
def test_other_names_are_rejected(name):
    errors = ValueError, va.errors.CheckpointError
    with pytest.raises(errors, match=r"owner/name\[@revision\]\[/file\], got|cannot be read"):
        va.load_checkpoint_(nn.Linear(1, 1), f"hf-hub:{name}")
    assert resolve_source("net.pth").name == "net.pth"
