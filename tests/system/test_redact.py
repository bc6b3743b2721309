"""Secrets are taken out of texts, settings and command lines, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import RecipeError
from trainer.system.redact import REDACTED, redact, redact_value, redact_words, refuse_redacted

SECRET = "s3cr3tV4lue0123456789abcdef"


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:{SECRET}@host/data.csv",
        f"https://{SECRET}@host/data.csv",
        f"s3://me:{SECRET}@bucket/key",
        f"https://me:a@{SECRET}@host/x",  # an @ that should have been written %40
        f"postgresql+psycopg://me:{SECRET}@db:5432/x",
        f"cannot fetch 'https://me:{SECRET}@host/x': timeout",
        f"https://host/x?token={SECRET}",
        f"https://host/x?a=1&api_key={SECRET}&b=2",
        f"https://host/x?X-Amz-Signature={SECRET}&X-Amz-Date=1",
        f"https://host/x?AWSAccessKeyId={SECRET}",
        f"https://host/x?sv=2020&sig={SECRET}#part",
        f"https://host/x?Key-Pair-Id=1&Signature={SECRET}",
        f"hf_{SECRET.replace('_', '')}",
        f"/data/ghp_{SECRET}/x",
        f"github_pat_{SECRET}",
        f"sk-proj-{SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"data.token='{SECRET}' is refused",
        f'{{"api_key": "{SECRET}"}}',
        f"Store(url='x', password='{SECRET}')",
    ],
)
def test_a_secret_in_a_text_is_taken_out(text):
    shown = redact(text)
    assert SECRET not in shown
    assert REDACTED in shown
    assert redact(shown) == shown


def test_the_rest_of_the_text_stays():
    url = "https://me:pw@host:8080/a/b.csv?version=3&token=abc&page=2#part"
    assert redact(f"x {url} y") == f"x https://{REDACTED}@host:8080/a/b.csv?version=3&token={REDACTED}&page=2#part y"
    for key in ("AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", "AIzaSyA1234567890abcdefghijklmnopqrstu"):
        assert redact(f"with {key}.") == f"with {REDACTED}."


@pytest.mark.parametrize(
    "text",
    [
        "stanfordnlp/imdb",
        "/home/me/data/train@2024/x.csv",
        "file:///home/me/w.safetensors",
        "https://host:8080/x?page=2&keyword=cat&monkey=1",
        "ssh://git@host/repository",
        "hf_models/distilbert",
        "risk-assessment-model-final-version-2",
        "pad_token='[PAD]' sort_key='length'",
        "loss 0.25, 3 tokens: 17 keys",
        "me@example.org",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


@given(st.text())
def test_redacting_twice_is_redacting_once(text):
    assert redact(redact(text)) == redact(text)


def test_settings_are_redacted_by_name_and_by_content():
    value = {"url": "https://a:b@h/x", "hub_token": "short", "pad_token": "[PAD]", "n": 3, "more": ["hf_" + "a1" * 17]}
    expected = {"url": f"https://{REDACTED}@h/x", "hub_token": REDACTED, "pad_token": "[PAD]", "n": 3}
    assert redact_value(value) == {**expected, "more": [REDACTED]}
    assert redact_value("abc", "data.token") == REDACTED
    assert redact_value(None, "data.token") is None
    assert redact_value("", "data.token") == ""  # says that there is none


def test_command_lines_are_redacted_by_flag():
    words = [
        "fit",
        "r.py",
        "--data.token",
        "abc",
        "--data.password=abc",
        "--data.url",
        "https://a:b@h",
        "--epochs",
        "3",
    ]
    shown = [REDACTED, f"--data.password={REDACTED}", "--data.url", f"https://{REDACTED}@h", "--epochs", "3"]
    assert redact_words(words) == [*words[:3], *shown]


def test_values_of_secret_variables_are_found_anywhere(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    monkeypatch.setenv("SOME_PATH", "/home/me/data")
    assert redact("key 0123456789abcdef0123 of /home/me/data") == f"key {REDACTED} of /home/me/data"


def test_a_setting_without_its_credentials_is_refused_by_name():
    refuse_redacted({"data.url": "https://host/x", "epochs": 3})
    said = r"^data\.url was written without its credentials: give it again as --data\.url$"
    with pytest.raises(RecipeError, match=said):
        refuse_redacted({"epochs": 3, "data.url": f"https://{REDACTED}@host/x"})


@pytest.mark.parametrize("part", ["x", "sk-", "://", "a=", 'a="', "eyJ", "&a", "a  "])
def test_a_text_without_end_is_looked_through_once(part):
    text = part * 100_000  # in quadratic time this would not come to an end
    assert redact(text) == text
