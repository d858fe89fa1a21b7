"""The queries of those who look after the house: status, verify, doctor and prune."""

ROOM = __package__ or "postroom.ops.house"
