"""The hub: asked once whether it is there, and what needs no hub at all."""

from __future__ import annotations

import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants
from transformers import AutoConfig

from trainer.errors import RecipeError
from trainer.models import BigBird, CausalLM, TextClassifier
from trainer.models.hub import BUNDLED_CONFIGS, bundled_config_folder, from_hub
from trainer.system import hub

NAME = "distilbert/distilbert-base-uncased"


@pytest.fixture
def online(monkeypatch, tmp_path):
    """A function: the hub is at this address from now on, and is allowed to be asked."""

    answers = hub._answers

    def at(endpoint):
        answers.cache_clear()
        hub.warn_offline_cache.cache_clear()
        for variable in ("HF_HUB_OFFLINE", hub.OURS):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    yield at
    answers.cache_clear()


@pytest.fixture
def silent():
    """The address of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_hub_that_says_nothing_is_asked_once_and_the_error_names_what_helps(online, silent, monkeypatch):
    online(silent)
    monkeypatch.setattr(hub, "ANSWER_TIMEOUT", 0.3)
    with pytest.raises(RecipeError) as refused:
        TextClassifier(NAME).prepare()
    text = str(refused.value)
    assert f"and {silent} does not answer within 0.3 s. Give a local folder" in text
    assert "set HF_ENDPOINT to a mirror of the hub, or HF_HUB_OFFLINE=1 to use only the cache" in text
    assert (constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]) == (True, "1")  # of processes that it starts, too
    monkeypatch.setattr(hub, "_answers", lambda endpoint: pytest.fail("it was asked again"))
    with pytest.raises(
        RecipeError, match=r"model\.name='nobody/absent' .*, or a model type such as distilbert or vit; "
    ):
        TextClassifier("nobody/absent", tokenizer="none").prepare()


def test_what_the_cache_has_is_taken_and_that_is_said_once(online, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        online(f"http://127.0.0.1:{free.getsockname()[1]}")  # nobody listens there
        for _ in range(2):
            assert from_hub("weights", NAME, lambda: "cached") == "cached"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer: warning: http://127.0.0.1:")
    assert "does not answer within 3 s: using its local cache; set HF_ENDPOINT" in line


def test_a_model_type_with_random_weights_needs_no_hub(online, monkeypatch):
    online("http://127.0.0.1:9")
    monkeypatch.setattr(hub, "_answers", lambda endpoint: pytest.fail("it was asked"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    module = CausalLM("llama", tokenizer="bytes", config={**sizes, "num_key_value_heads": 2}).build()
    assert module.lm_head.weight.shape == (260, 8)


def test_a_hub_that_answers_anything_is_there(online):
    asked = []

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_response(503)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        online(f"http://127.0.0.1:{server.server_address[1]}")
        assert [hub.offline_reason(), hub.offline_reason()] == ["", ""]
        server.shutdown()
    assert (len(asked), constants.HF_HUB_OFFLINE) == (1, False)


def test_who_asked_to_be_offline_is_told_so():
    with pytest.raises(RecipeError, match=r"so the hub is not asked\. .*; unset HF_HUB_OFFLINE to ask the hub$"):
        TextClassifier("nobody/absent", tokenizer="none").prepare()


@pytest.mark.parametrize("name", [name for name in BUNDLED_CONFIGS if "bert" in name])
def test_the_configuration_of_a_packaged_recipe_is_here_and_is_that_of_transformers(name):
    folder = bundled_config_folder(name)
    assert folder is not None
    settings = json.loads((folder / "config.json").read_text())
    usual = AutoConfig.for_model(settings["model_type"]).to_dict()
    own = {key: value for key, value in settings.items() if key in usual and key != "architectures"}
    assert len(own) > 10
    assert own == {key: usual[key] for key in own}
    kind = BigBird if "bigbird" in name else TextClassifier
    config = kind(name, tokenizer="none", num_classes=2)._configuration()
    assert (config.vocab_size, config.num_labels, config.name_or_path) == (settings["vocab_size"], 2, name)
    with pytest.raises(RecipeError, match="is not asked"):  # of weights it is what comes with them
        kind(name, weights=name, tokenizer="none")._configuration()
    assert bundled_config_folder(f"somebody/{name.rpartition('/')[2]}") is None
