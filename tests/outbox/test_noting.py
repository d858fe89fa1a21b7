"""What a receiver answered is kept as it said it: without secrets, and JSON stays JSON."""

import pytest

from helpers_messages import make_message
from postroom.ledger.rules import HEADER
from postroom.outbox import noting


def kept(answer: str) -> str:
    """An answer as the ledger gets it."""
    message = make_message(headers={HEADER: "k"})
    (note,) = noting.delivered([message], {message.position: answer}, str).values()
    assert note.answer is not None
    return note.answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"status":"booked","token":"ETH","n":1}', '{"status":"booked","token":"***","n":1}'),
        ('{"token_id": 17, "fee": "0.1"}', '{"token_id":"***","fee":"0.1"}'),
        ('{"a":[{"api_key":{"id":1}}]}', '{"a":[{"api_key":"***"}]}'),
        (
            '{"token":"x","price":1.10,"n":1e400,"é":"ü"}',
            '{"token":"***","price":1.10,"n":1e400,"é":"ü"}',
        ),
        ('{"has_token":true,"token":null}', '{"has_token":true,"token":null}'),
        ('{"token":"x","n":1,"n":2}', '{"token":"***","n":1,"n":2}'),
        (
            '{"at":"nats://u:CANARY@h","said":"password=CANARY"}',
            '{"at":"nats://u:***@h","said":"password=***"}',
        ),
        ('"Bearer CANARY"', '"Bearer ***"'),
        ('{ "status": "booked",\n "price": 1.10 }', '{ "status": "booked",\n "price": 1.10 }'),
        ("booked, token=CANARY", "booked, token=***"),
        ('{"cut off", "token":"CANARY"', '{"cut off", "token":"***"'),
        ("[" * 60_000, "[" * 60_000),
        ("", ""),
    ],
)
def test_an_answer_is_kept_without_secrets(answer: str, expected: str) -> None:
    assert kept(answer) == expected
