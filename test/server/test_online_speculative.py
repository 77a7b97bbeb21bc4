"""Speculative decoding over HTTP: the flag reaches the engine, and its metrics come back."""

from __future__ import annotations

from server_helpers import ServerProcess


def test_speculative_config_enables_drafts_and_metrics() -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    with ServerProcess("--speculative-config", config) as process:
        server = process.wait_ready()
        with server.client() as client:
            answer = client.post(
                "/v1/completions",
                json={"prompt": "x", "max_tokens": 40, "allowed_token_ids": [65]},
            )
        assert answer.json()["choices"][0]["text"] == "A" * 40
        drafts = server.metric("spec_decode_num_drafts_total")
        accepted = server.metric("spec_decode_num_accepted_tokens_total")
        assert 1 <= drafts <= accepted < 40
        assert server.metric("spec_decode_mean_accepted_length") == 1 + accepted / drafts
        with server.client() as client:
            text = client.get("/metrics").text
        assert 'spec_decode_num_accepted_tokens_per_pos_total{model_name="' in text


def test_invalid_speculative_config_is_rejected_at_start() -> None:
    with ServerProcess("--speculative-config", '{"method": "medusa"}') as process:
        assert process.process.wait(60) != 0
        assert any("method is 'medusa'" in line for line in process.log), process.log
