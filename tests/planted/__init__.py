"""Bugs that are kept, to show that the suite would find them: POSTROOM_PLANTED=name plants one.

Production code has no switches. A bug replaces a method, or words of a named query, in the memory
of a test process and of the children it starts; `tests/test_planted.py` demands that the tests
named here then fail, each by an assertion of its own.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

SWITCH = "POSTROOM_PLANTED"

ALL = ("postgresql", "mariadb", "sqlite")
SERVERS = ("postgresql", "mariadb")

STORE = "tests/outbox/test_store.py::"
FAILURES = "tests/outbox/test_relay_failures.py::"
ORDER = "tests/outbox/test_relay_order.py::"
SUSPECTS = "tests/outbox/test_relay_suspects.py::"
STEPS = "tests/outbox/test_clock_steps.py::"
UNSETTLED = "tests/outbox/test_relay_unsettled.py::"
ADDRESSES = "tests/brokers/test_webhook_addresses.py::"
JOBS = "tests/ops/test_jobs.py::"
WAKE = "tests/outbox/test_relay_wake.py::"
LATE = "tests/outbox/test_relay_late.py::"
KAFKA = "tests/brokers/test_kafka_order.py::"
RECEIVING = "tests/brokers/test_receiving.py::"
TAKEOVER = "tests/brokers/test_nats_takeover.py::"
CONSUMER = "tests/inbox/test_consumer.py::"
PASSED = "tests/inbox/test_passed_over.py::"
DJANGO = "tests/inbox/test_django_handlers.py::"
HANDLERS = "tests/inbox/test_failures.py::"
LIMITS = "tests/guarantees/test_connection_limits.py::"
SEATS = "tests/inbox/test_seats.py::"
SAME = "tests/idempotency/test_same_transaction.py::"
KEYED = "tests/idempotency/test_frameworks.py::"
PLACES = ("starlette-sqlite", "starlette-postgresql", "flask-mariadb")
LEDGER = "tests/ledger/test_ledger.py::"
DOUBTS = "tests/ledger/test_ledger_doubts.py::"
GATEWAY = "tests/gateway/test_gateway.py::"
REQUESTS = "tests/idempotency/test_requests.py::"


def on(test: str, *cases: str) -> tuple[str, ...]:
    """A test in these of its cases."""
    return tuple(f"{test}[{case}]" for case in cases)


STALE_WRITES = on(
    f"{STORE}test_a_stale_epoch_or_another_owner_writes_nothing",
    *(f"{kind}-{source}" for kind in ALL for source in ("from the outbox", "from held")),
)
CONFIRMED = on(f"{FAILURES}test_exactly_what_was_confirmed_is_settled", *ALL)


@dataclass(frozen=True)
class Bug:
    """What it breaks, and the tests that must notice. `planted.bugs` has a function of its name."""

    breaks: str
    red: tuple[str, ...]


BUGS: dict[str, Bug] = {
    "fence_removed": Bug(
        "a relay that lost its lane still writes down what it learnt",
        (
            *STALE_WRITES,
            *on(
                "tests/outbox/test_relay_owning.py::"
                "test_a_zombie_writes_nothing_and_its_lane_is_drained_by_the_new_owner",
                *ALL,
            ),
        ),
    ),
    "fence_without_owner": Bug(
        "the epoch alone is checked, so another relay's lane may be written", STALE_WRITES
    ),
    "fence_without_epoch": Bug(
        "the owner alone is checked, so what was read before a take-over may be written after it",
        STALE_WRITES,
    ),
    "fence_that_does_not_lock": Bug(
        "the fence is looked at, as by EXISTS, and not held: a take-over may pass the settle",
        on(
            f"{STORE}test_a_settle_and_a_take_over_never_both_happen",
            *(f"{how}-{kind}" for kind in SERVERS for how in ("plain", "with a failure")),
        ),
    ),
    "reaper_without_fence": Bug(
        "an operator's decision overwrites what has been finished since it was read",
        on(
            "tests/outbox/test_dead_letters.py::test_what_was_finished_meanwhile_stays_finished",
            *SERVERS,
        ),
    ),
    "prune_without_state": Bug(
        "pruning deletes dead letters that nobody has decided about",
        on("tests/ops/test_prune.py::test_what_is_old_goes_and_what_is_undecided_stays", *ALL),
    ),
    "redrive_without_pace": Bug(
        "each worker redrives dead letters at the full rate of the rule, without the shared limit",
        on("tests/outbox/test_redriver.py::test_the_rate_holds_for_all_workers_together", *ALL),
    ),
    "take_without_lock": Bug(
        "free lanes are looked for and taken in two steps that others may come between",
        on(f"{STORE}test_of_many_takers_one_wins_each_lane", *SERVERS),
    ),
    "take_without_lease": Bug(
        "a lane is taken from a relay whose lease has not ended",
        on(f"{STORE}test_an_owned_lane_is_left_alone_until_its_lease_ends", *ALL),
    ),
    "lease_never_ends": Bug(
        "the lanes of a dead relay stay its own for ever",
        on(f"{STORE}test_an_owned_lane_is_left_alone_until_its_lease_ends", *ALL),
    ),
    "lease_of_the_future": Bug(
        "a lease that was written before the clock went back lasts until then",
        (
            *on(f"{STEPS}test_a_dead_relays_lanes_are_free", *(f"{kind}-known" for kind in ALL)),
            *on(f"{STEPS}test_a_key_whose_owner_died_is_in_doubt_after_one_lease", *ALL),
            *on(f"{STEPS}test_a_retry_of_a_dead_consumer_is_due", *ALL),
        ),
    ),
    "application_clock": Bug(
        "leases are measured by the clock of the relay's machine",
        on(f"{STORE}test_the_clock_of_a_relays_machine_decides_nothing", *ALL),
    ),
    "watermark_last_read": Bug(
        "the next read begins after the last position read, past whoever commits late",
        (
            "tests/outbox/test_horizon.py::test_nothing_committed_is_ever_behind_the_watermark",
            *on(
                "tests/outbox/test_relay_late.py::test_a_late_committer_is_delivered_once", *SERVERS
            ),
        ),
    ),
    "watermark_by_transaction_number": Bug(
        "only open transactions that have a number are waited for, as with pg_snapshot_xmin",
        on(
            f"{LATE}test_a_position_taken_before_a_transaction_number_is_not_skipped",
            "postgresql",
        ),
    ),
    "figures_from_the_watermark": Bug(
        "messages in flight are left out of the figures, so that alerts end during an outage",
        on(
            "tests/outbox/test_relay_outages.py::"
            "test_figures_never_fall_and_the_alert_stays_until_recovery",
            "postgresql-1",
        ),
    ),
    "settled_before_receipt": Bug(
        "a message is settled when it is sent, before the broker has said yes", CONFIRMED
    ),
    "batch_settled_as_one": Bug("one receipt of a batch counts for all of it", CONFIRMED),
    "receipts_forgotten": Bug(
        "messages that were sent and could not be settled are sent again after the reconnect",
        on(f"{UNSETTLED}test_what_cannot_be_settled_is_sent_once", *ALL),
    ),
    "no_probe": Bug(
        "a relay whose settles fail reads and sends on as if they did not",
        on(f"{UNSETTLED}test_what_cannot_be_settled_is_sent_once", *ALL),
    ),
    "read_before_settle": Bug(
        "the next read begins before the settle is committed and sees what was just sent",
        on(
            "tests/outbox/test_relay_basics.py::test_what_is_committed_arrives_in_order",
            *ALL,
        ),
    ),
    "held_key_passed": Bug(
        "a later message of a held key is sent",
        on(f"{FAILURES}test_a_failed_message_waits_with_its_key_while_others_flow", *ALL)
        + on(f"{ORDER}test_later_ones_that_another_relay_finds", *ALL),
    ),
    "key_in_flight_twice": Bug(
        "a whole batch is under way at once at a broker that keeps no order",
        on(
            f"{ORDER}test_later_ones_in_the_same_batch_or_the_next",
            *(f"{kind}-1000-1" for kind in ALL),
        ),
    ),
    "attempts_spent_on_outage": Bug(
        "a destination that is down costs its messages their attempts",
        on(
            "tests/outbox/test_relay_destinations.py::"
            "test_an_outage_longer_than_all_attempts_buries_nothing",
            *ALL,
        ),
    ),
    "permanent_tried_again": Bug(
        "what the broker refused for ever is sent again",
        on(f"{FAILURES}test_a_permanent_refusal_is_buried_at_once", *ALL),
    ),
    "unknown_is_delivered": Bug(
        "no answer counts as a yes",
        on(f"{FAILURES}test_an_unknown_outcome_is_sent_again_with_the_same_id", *ALL),
    ),
    "random_kills_blamed": Bug(
        "a message is blamed for deaths at which it was not alone",
        on(f"{SUSPECTS}test_random_kills_bury_nothing", *ALL),
    ),
    "late_deaths_blamed": Bug(
        "a message is blamed for three deaths, though they came in the middle of its sends",
        on(f"{SUSPECTS}test_late_deaths_bury_nothing_for_long", *ALL),
    ),
    "no_journal": Bug(
        "nothing says what is being sent, so a message that kills its sender does so for ever",
        on(f"{SUSPECTS}test_the_journal_stands_while_a_send_is_under_way", *ALL),
    ),
    "hints_only": Bug(
        "a relay that is not woken does not look",
        on(f"{WAKE}test_a_lost_hint_costs_a_poll", "sqlite"),
    ),
    "replayed_for_each_delivery": Bug(
        "a replay sends a message as often as it was delivered before",
        on(f"{JOBS}test_a_message_with_several_deliveries_is_replayed_once", *ALL),
    ),
    "hint_for_one_lane": Bug(
        "a hint that comes during a read wakes one lane, and the others wait for their poll",
        on(f"{WAKE}test_a_hint_during_a_read_reaches_every_lane", "sqlite"),
    ),
    "hints_stay_rare": Bug(
        "after a burst the pause between hints stays long while commits go on at a low rate",
        (f"{WAKE}test_the_pause_comes_down_when_a_burst_is_over",),
    ),
    "sigterm_exits": Bug(
        "a relay that is told to stop drops what is under way",
        on(
            "tests/guarantees/test_sigterm.py::"
            "test_sigterm_at_any_moment_loses_and_repeats_nothing",
            *ALL,
        ),
    ),
    "lanes_wait_for_the_house": Bug(
        "a relay that is told to stop goes on sending until its housekeeping has come home",
        on(
            "tests/outbox/test_relay_stopping.py::"
            "test_it_hands_over_at_once_though_its_housekeeping_waits_for_a_lock",
            *SERVERS,
        ),
    ),
    "serialize_key_ignored": Bug(
        "writers of one key do not take turns",
        on(
            "tests/outbox/test_publish_races.py::test_writers_of_one_key_take_turns",
            "psycopg.Connection-postgresql-default",
            "pymysql.Connection-mariadb-default",
        ),
    ),
    "publish_commits_alone": Bug(
        "a message is written where it commits without the change it tells of",
        on(
            "tests/outbox/test_publish.py::test_refused_where_it_would_commit_by_itself",
            "psycopg.Connection-postgresql-default",
            "pymysql.Connection-mariadb-default",
            "sqlite3.Connection-sqlite-default",
        ),
    ),
    "was_committed_guesses": Bug(
        "a COMMIT whose answer was lost is taken for done",
        on(
            "tests/guarantees/test_lost_commits.py::"
            "test_the_caller_can_find_out_what_became_of_a_commit",
            "psycopg",
            "asyncmy",
        ),
    ),
    "nan_published": Bug(
        "a payload that is no JSON is committed, and refused by whoever reads it",
        on(
            "tests/outbox/test_payloads.py::"
            "test_any_payload_arrives_as_it_was_or_is_refused_when_published",
            *ALL,
        ),
    ),
    "chosen_id_unclaimed": Bug(
        "a second message under an id that its publisher chose is written, and receivers drop it",
        on(
            "tests/outbox/test_publish.py::test_a_chosen_id_stands_for_one_content",
            "psycopg.Connection-postgresql-default",
            "pymysql.Connection-mariadb-default",
            "sqlite3.Connection-sqlite-default",
        ),
    ),
    "sqlite_transaction_in_pieces": Bug(
        "a worker on SQLite holds the file's lock until its event loop comes round again",
        (
            "tests/databases/test_database.py::"
            "test_a_transaction_on_sqlite_never_waits_for_the_loop",
        ),
    ),
    "naive_model_published": Bug(
        "a model with a datetime without a time zone is published as text of no known instant",
        on(
            "tests/test_model_payloads.py::test_a_naive_datetime_is_refused",
            "pydantic",
            "pydantic nested",
            "msgspec",
            "msgspec nested",
        ),
    ),
    "webhook_address_unchecked": Bug(
        "a webhook goes wherever its name leads, into one's own network too",
        (
            *on(
                f"{ADDRESSES}test_no_connection_is_made",
                "'https://127.0.0.1.nip.io:PORT/hook'",
                "'https://metadata.google.internal:PORT/hook'",
            ),
            *on(
                f"{ADDRESSES}test_a_name_that_leads_inside_is_not_connected_to",
                "127.0.0.1",
                "::1",
            ),
        ),
    ),
    "webhook_resolved_twice": Bug(
        "the address of a webhook is checked, and then asked for once more to connect to",
        (f"{ADDRESSES}test_the_address_that_was_checked_is_the_one_connected_to",),
    ),
    "kafka_goes_on_after_a_refusal": Bug(
        "later messages of a key are written to Kafka though the batch before them was refused",
        on(
            f"{KAFKA}test_nothing_passes_a_batch_that_is_refused",
            "0-MSG_SIZE_TOO_LARGE",
            "3-INVALID_RECORD",
        ),
    ),
    "kafka_trusts_a_strange_partition": Bug(
        "many messages go at once to a partition of Kafka that takes any number of ours for the"
        " next",
        on(
            f"{KAFKA}test_nothing_of_a_key_passes_a_message_that_is_too_large",
            "fresh producer-extra0-0",
        ),
    ),
    "kafka_sends_what_is_behind": Bug(
        "what comes after a refused message of its key goes out again without it",
        (f"{KAFKA}test_a_topic_we_may_not_write_to_keeps_back_what_comes_later",),
    ),
    "take_over_at_once": Bug(
        "a receiver of NATS that takes over hands out what is new before what the other left",
        (
            *on(f"{RECEIVING}test_a_killed_process_gives_back_what_it_had", "nats"),
            *on(
                f"{RECEIVING}test_a_frozen_process_is_taken_over_and_comes_back_with_a_greater"
                "_claim",
                "nats",
            ),
        ),
    ),
    "empty_pull_believed": Bug(
        "a receiver of NATS takes the end of a pull for the end of the unacknowledged messages",
        (
            f"{TAKEOVER}test_a_pull_that_ends_without_messages_is_no_end_of_what_others_left",
            f"{TAKEOVER}test_what_was_given_back_is_waited_for_while_the_server_is_slow",
        ),
    ),
    "pin_outlives_its_connection": Bug(
        "a receiver of NATS that connects again lets a pull of its old connection take messages",
        (f"{TAKEOVER}test_a_pull_of_an_earlier_connection_takes_nothing_away",),
    ),
    "given_back_is_passed": Bug(
        "later messages of a stream are handed out while earlier ones are on their way back",
        ("tests/brokers/test_nats_receiving.py::test_a_tray_waits_for_what_comes_back",),
    ),
    "claim_never_grows": Bug(
        "a consumer cannot tell what came before another had its source from what came after",
        on(f"{RECEIVING}test_a_server_killed_while_receiving_costs_no_message", "nats"),
    ),
    "one_refusal_ends_a_worker": Bug(
        "a worker that lost its database ends with the first connection that is refused",
        (
            *on(
                f"{LIMITS}test_a_worker_outlives_a_server_that_comes_back_too_small",
                *(f"{worker}-{kind}" for worker in ("relay", "consumer") for kind in ALL),
            ),
        ),
    ),
    "silence_not_noticed": Bug(
        "a consumer keeps its source while its database does not answer",
        on(
            "tests/inbox/test_silent_consumer_database.py::"
            "test_a_healthy_consumer_takes_over_while_a_database_is_silent",
            "postgresql-idle",
            "mariadb-idle",
        ),
    ),
    "inbox_forgets": Bug(
        "a message that comes again is handled again",
        on(f"{CONSUMER}test_what_comes_again_is_skipped", *ALL),
    ),
    "effect_in_a_second_transaction": Bug(
        "the inbox's row commits before its effect, which a failure then loses",
        on(f"{CONSUMER}test_a_failure_takes_the_inboxs_row_along", *ALL),
    ),
    "django_effect_outside": Bug(
        "a handler's changes through Django's ORM commit separately, also when the handler fails",
        on(f"{DJANGO}test_a_handler_that_fails_twice_leaves_one_row", *SERVERS),
    ),
    "error_passed_over": Bug(
        "a handler that passes over an error of PostgreSQL loses its message with its transaction",
        on(
            f"{PASSED}test_its_message_and_those_beside_it_are_not_lost",
            "postgresql-False-session",
            "postgresql-True-connection",
        ),
    ),
    "acknowledged_before_commit": Bug(
        "the broker has its yes before the effect is committed",
        on(f"{CONSUMER}test_nothing_is_acknowledged_before_its_commit", *ALL),
    ),
    "seat_not_checked": Bug(
        "a process that wakes up late applies what another was given meanwhile",
        on(f"{SEATS}test_what_came_under_an_older_epoch_is_void", *ALL),
    ),
    "parked_key_passed": Bug(
        "a later message of a key is handled while an earlier one waits to be tried again",
        on(f"{HANDLERS}test_only_the_one_that_fails_fails", *ALL),
    ),
    "content_not_compared": Bug(
        "the same id with other content is skipped in silence",
        on(
            f"{HANDLERS}test_the_same_id_with_other_content_is_buried_and_not_skipped",
            *ALL,
        ),
    ),
    "key_without_scope": Bug(
        "a key belongs to nobody, so that one user is told another's answer",
        on(f"{SAME}test_one_user_never_sees_another_s_answer", *ALL),
    ),
    "fingerprint_not_compared": Bug(
        "another request with a known key is answered from memory",
        on(f"{SAME}test_another_request_with_the_key_is_refused", *ALL),
    ),
    "model_without_its_class": Bug(
        "a model of another class with equal members is answered with the result of the first",
        on("tests/idempotency/test_arguments.py::test_a_model_is_compared_by_its_members", "Order"),
    ),
    "key_in_a_second_transaction": Bug(
        "a key is claimed in a commit of its own, and stays when its request is rolled back",
        on(f"{SAME}test_refusals_that_pass_leave_nothing", *(f"{kind}-500" for kind in ALL)),
    ),
    "view_committed_before_its_key": Bug(
        "a decorated view commits what it did before its answer is written down",
        on(
            "tests/idempotency/test_views.py::test_an_error_beside_the_commit",
            *("flask-postgresql", "flask raw-mariadb", *(f"django-{kind}" for kind in ALL)),
        ),
    ),
    "function_committed_before_its_key": Bug(
        "a decorated function commits what it did before its result is written down",
        on(
            "tests/idempotency/test_functions.py::"
            "test_once_for_each_key_in_the_caller_s_transaction",
            "psycopg.Connection-postgresql-default",
            "sqlalchemy.AsyncSession-mariadb-asyncmy",
            "sqlite3.Connection-sqlite-default",
        ),
    ),
    "key_free_before_its_answer": Bug(
        "the key of a request is free again before its answer is written down",
        on(f"{KEYED}test_one_effect_and_one_answer", *PLACES),
    ),
    "key_without_epoch": Bug(
        "whoever comes late overwrites the answer that another has given",
        on(f"{KEYED}test_whoever_was_overruled_writes_nothing", *PLACES),
    ),
    "lost_key_run_again": Bug(
        "a request whose process was lost is carried out again, whatever it did elsewhere",
        on(f"{KEYED}test_a_lost_owner_leaves_a_doubt", *PLACES),
    ),
    "given_up_and_kept": Bug(
        "a claim that was given up holds its key though the database answers again",
        on(
            "tests/guarantees/test_given_up.py::"
            "test_whoever_gives_a_claim_back_may_die_at_any_point",
            *("postgresql-async", "mariadb-sync", "sqlite-sync"),
        ),
    ),
    "sent_again_unasked": Bug(
        "what may have arrived is sent again without a look whether it did",
        (
            *on(f"{LEDGER}test_what_a_dead_relay_was_sending_is_asked_for_first", *ALL),
            *on(f"{LEDGER}test_one_that_was_on_its_way_is_found_before_it_is_sent_again", *ALL),
        ),
    ),
    "doubt_left_behind": Bug(
        "what may have arrived and waits elsewhere is taken for something new",
        on(f"{DOUBTS}test_a_suspect_behind_a_suspect_is_asked_for", *ALL),
    ),
    "doubt_forgotten": Bug(
        "an answer to the second try says that the first did not arrive",
        (
            *on(f"{DOUBTS}test_not_arrived_ends_the_doubt_for_no_later_try", *ALL),
            *on(
                f"{DOUBTS}test_a_refusal_in_doubt_is_asked_for_before_it_is_believed",
                *(f"{kind}-yes" for kind in ALL),
            ),
        ),
    ),
    "journal_dropped_in_doubt": Bug(
        "a relay that lost its database forgets in its journal what it was sending",
        on(f"{DOUBTS}test_what_was_sent_and_not_settled_outlives_a_reconnect", *ALL),
    ),
    "any_answer_is_not_arrived": Bug(
        "a look-up that reached nobody means that nothing arrived",
        on(f"{DOUBTS}test_only_not_arrived_means_so", *(f"{kind}-unreachable" for kind in ALL)),
    ),
    "asked_for_all_at_once": Bug(
        "what is asked for in vain is passed by later messages of its key",
        on(f"{DOUBTS}test_nothing_passes_what_nobody_can_say_anything_of", *ALL),
    ),
    "unknown_called_failed": Bug(
        "the ledger says failed of a request that may have arrived",
        on(f"{LEDGER}test_what_may_have_arrived_has_not_failed", *ALL),
    ),
    "notes_unfenced": Bug(
        "a relay that lost its lane still writes into the ledger",
        on(f"{LEDGER}test_a_lane_that_was_lost_says_nothing", *ALL),
    ),
    "finished_overwritten": Bug(
        "a late copy of a message changes how its request ended",
        on(f"{LEDGER}test_a_late_copy_changes_nothing", *ALL),
    ),
    "digest_not_compared": Bug(
        "another request under a known key is answered with the first one's result",
        on(f"{LEDGER}test_a_key_is_accepted_once", *ALL),
    ),
    "answered_before_commit": Bug(
        "the gateway says that it has accepted an order before that is committed",
        on(f"{GATEWAY}test_first_202_then_200_and_another_order_409", *ALL),
    ),
    "key_ends_with_its_client": Bug(
        "a client that hangs up ends the work of its request in the middle",
        on(
            "tests/guarantees/test_hanging_up.py::test_at_each_await",
            "sqlite-external",
        ),
    ),
    "call_torn_by_its_caller": Bug(
        "a function whose caller is cancelled leaves a claim, or no trace of its result",
        on(
            "tests/idempotency/test_claims_that_fail.py::"
            "test_a_run_cancelled_while_it_claims_is_gone_on_with",
            *ALL,
        )
        + on(
            "tests/idempotency/test_functions.py::"
            "test_what_has_ended_is_written_down_though_its_caller_is_cancelled",
            "postgresql-returns-resumable",
        ),
    ),
    "point_not_fenced": Bug(
        "a resumable run that was taken over still reaches its points",
        on("tests/idempotency/test_resume.py::test_who_was_taken_over_reaches_no_point", *ALL),
    ),
    "points_forget_each_other": Bug(
        "of two calls of a run that end together one is forgotten, and made again",
        on(
            "tests/idempotency/test_resume.py::test_calls_and_points_side_by_side_forget_none",
            "sqlite",
        ),
    ),
    "key_of_nobody": Bug(
        "a route that has not said whose key it is shares one with everybody",
        (
            f"{REQUESTS}test_a_resumable_route_says_whose_key_it_is",
            f"{REQUESTS}test_authentication_of_the_route_comes_before_an_answer_from_memory",
        ),
    ),
    "path_to_the_letter": Bug(
        "a path that a router reads more generously is carried out without its key",
        ("tests/idempotency/test_key_rules.py::test_policies_are_found_by_method_and_path",),
    ),
    "redirect_not_kept": Bug(
        "a view that answers with a redirect is carried out at every try",
        on(f"{REQUESTS}test_a_redirect_of_a_view_is_its_answer", "asgi-307", "wsgi-301"),
    ),
    "redirect_kept": Bug(
        "where an application has a root, a router's redirect is the answer for ever",
        on(
            f"{REQUESTS}test_a_redirect_of_flask_s_router_is_followed_with_the_same_key",
            "/shop",
        ),
    ),
    "decided_for_a_day": Bug(
        "what a person has decided is forgotten after a day, and carried out again",
        on(
            "tests/ops/test_cli_keys.py::"
            "test_what_a_person_decides_is_kept_no_shorter_than_its_policy_says",
            *(f"{kind}---done" for kind in ALL),
        ),
    ),
    "commit_not_noted": Bug(
        "a conflict in a hook after the commit says that nothing was carried out",
        on(
            "tests/idempotency/test_views.py::test_a_hook_after_the_commit_undoes_nothing",
            *(f"{kind}-lose" for kind in ALL),
        ),
    ),
    "begun_and_forgotten": Bug(
        "a route that has paid and then finds its request not valid pays at every try",
        on(
            f"{REQUESTS}test_what_is_found_not_valid_keeps_its_key_if_its_route_has_begun",
            "async-external",
            "thread-external",
        ),
    ),
    "described_is_done": Bug(
        "a handler that only gave a generator, or a coroutine, is taken for one that has run",
        on(
            "tests/inbox/test_calling.py::test_what_was_not_awaited_has_failed",
            "sqlite-generator",
        ),
    ),
    "held_forgotten": Bug(
        "a message that waits as a dead letter is forgotten, and its copy handled beside it",
        on("tests/inbox/test_redrive.py::test_what_it_still_has_is_not_forgotten", "sqlite-k"),
    ),
    "type_not_compared": Bug(
        "the same id of another type or source is skipped in silence",
        (
            f"{HANDLERS}test_an_id_of_others_is_unique_within_its_source_only",
            *on(f"{HANDLERS}test_the_same_id_of_another_type_is_another_message", "sqlite"),
        ),
    ),
    "proxy_believed": Bug(
        "what a proxy says is taken for the exchange's word",
        (
            *on(
                "tests/gateway/test_adapter.py::test_what_an_answer_to_an_order_means",
                "413-<html>a load balancer</html>-expected18",
            ),
            *on(
                "tests/gateway/test_adapter.py::test_what_an_answer_to_a_question_means",
                "404-<h1>Not Found</h1>-expected3",
            ),
        ),
    ),
    "page_is_a_client": Bug(
        "any web page that is open beside a gateway without tokens places orders",
        on(
            f"{GATEWAY}test_a_page_in_a_browser_places_no_order",
            "headers3-403-cross-site",
            "headers4-421-wrong-host",
        ),
    ),
    "simulated_with_settings": Bug(
        "what is only played reads the settings of the place, and reaches its exchange",
        (
            "tests/gateway/test_gateway_show.py::"
            "test_a_child_finds_the_package_by_a_path_that_was_relative",
        ),
    ),
    "password_with_a_comma": Bug(
        "the name of a broker shows the rest of a password, in logs and on record",
        on(
            "tests/ops/test_no_secrets.py::"
            "test_a_relay_shows_and_keeps_nothing_secret_of_a_brokers_url",
            "redis://127.0.0.1:9/?password=p,canary-pa55",
        ),
    ),
    "network_opens_metadata": Bug(
        "who allows webhooks a network allows them the machine's own secrets in it",
        on(
            f"{ADDRESSES}test_what_is_allowed_by_name_or_network",
            "169.254.0.0/16-hooks.internal-169.254.169.254-False",
        ),
    ),
}


def plant_chosen() -> None:
    """Plant the bug that the environment names, if it names one."""
    if name := os.environ.get(SWITCH):
        from . import bugs

        plant: Callable[[], None] = getattr(bugs, name)
        plant()
