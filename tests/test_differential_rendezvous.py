"""Collectives replayed as they are issued: the first pair that cannot meet is named."""

from __future__ import annotations

from spmdtypes.differential.experiment import Call
from spmdtypes.differential.rendezvous import Rendezvous, group_axes

PAIR = (0, 1)


def call(kind: str, group: tuple[int, ...] = PAIR, **more: object) -> Call:
    return Call(kind, group, shapes=((4,),), dtype="float64", **more)  # type: ignore[arg-type]


def test_equal_sequences_meet() -> None:
    meeting = Rendezvous(2)
    for rank in PAIR:
        assert meeting.issue(rank, call("all_reduce")) is None
        assert meeting.issue(rank, call("broadcast", root=0)) is None
        assert meeting.finish(rank) is None


def test_another_kind_names_both_sides() -> None:
    meeting = Rendezvous(2)
    meeting.issue(0, call("all_reduce"))
    found = meeting.issue(1, call("all_gather"))
    assert found is not None
    assert found.reason == "kind"
    assert found.ranks == (1, 0)
    assert [c.kind for c in found.calls if c] == ["all_gather", "all_reduce"]


def test_another_root_or_shape_or_operation_is_a_mismatch() -> None:
    def reason(a: Call, b: Call) -> str | None:
        meeting = Rendezvous(2)
        meeting.issue(0, a)
        found = meeting.issue(1, b)
        return found.reason if found else None

    assert reason(call("broadcast", root=0), call("broadcast", root=1)) == "root"
    assert reason(call("all_reduce", reduce_op="sum"), call("all_reduce", reduce_op="avg")) == "reduce_op"
    assert reason(call("all_reduce", reduce_op="sum"), call("all_reduce")) is None
    assert reason(call("all_reduce"), Call("all_reduce", PAIR, shapes=((5,),), dtype="float64")) == "shape"


def test_a_rank_that_finishes_early_leaves_its_peer_waiting() -> None:
    meeting = Rendezvous(2)
    assert meeting.finish(0) is None
    found = meeting.issue(1, call("all_reduce"))
    assert found is not None
    assert found.reason == "missing"
    assert found.calls[1] is None

    meeting = Rendezvous(2)
    assert meeting.issue(1, call("all_reduce")) is None
    found = meeting.finish(0)
    assert found is not None
    assert found.ranks == (1, 0)


def test_a_rank_that_failed_is_no_divergence() -> None:
    meeting = Rendezvous(2)
    meeting.issue(1, call("all_reduce"))
    meeting.fail(0)
    assert meeting.blocked(1)


def test_uneven_all_to_all_meets_when_sender_and_receiver_agree() -> None:
    meeting = Rendezvous(2)
    assert meeting.issue(0, call("all_to_all", splits=((1, 3), (1, 2)))) is None  # (expects, sends)
    assert meeting.issue(1, call("all_to_all", splits=((2, 0), (3, 0)))) is None

    meeting = Rendezvous(2)
    meeting.issue(0, call("all_to_all", splits=((1, 3), (1, 2))))
    found = meeting.issue(1, call("all_to_all", splits=((9, 0), (3, 0))))
    assert found is not None
    assert found.reason == "splits"


def test_groups_taken_in_opposite_order_are_a_deadlock() -> None:
    meeting = Rendezvous(3)
    assert meeting.issue(0, call("all_reduce", (0, 1))) is None
    assert meeting.issue(1, call("all_reduce", (1, 2))) is None
    found = meeting.issue(2, call("all_reduce", (0, 2)))
    assert found is not None
    assert found.reason == "deadlock"


def test_send_meets_receive_and_both_directions_are_apart() -> None:
    meeting = Rendezvous(2)
    assert meeting.issue(0, call("send", (0, 1), peer=1, blocking=False)) is None
    assert meeting.issue(0, call("recv", (1, 0), peer=1)) is None
    assert meeting.issue(1, call("send", (1, 0), peer=0, blocking=False)) is None
    assert meeting.issue(1, call("recv", (0, 1), peer=0)) is None


def test_collectives_from_different_lines_are_noted() -> None:
    from spmdtypes.graph import Frame

    meeting = Rendezvous(2)
    meeting.issue(0, call("all_reduce", frames=(Frame("a.py", 1, 0, 1, 5, "f"),)))
    assert meeting.issue(1, call("all_reduce", frames=(Frame("a.py", 9, 0, 9, 5, "f"),))) is None
    assert [d.reason for d in meeting.crossed] == ["line"]


def test_axes_of_a_group() -> None:
    mesh = {"dp": 2, "cp": 2, "tp": 2}
    assert group_axes((0, 1), mesh) == ("tp",)
    assert group_axes((0, 4), mesh) == ("dp",)
    assert group_axes((1, 3, 5, 7), mesh) == ("dp", "cp")
    assert group_axes(range(8), mesh) == ("dp", "cp", "tp")
    assert group_axes((0, 3), mesh) == ()


def waiting(*calls: tuple[int, Call]) -> Rendezvous:
    meeting = Rendezvous(3)
    for rank, c in calls:
        assert meeting.issue(rank, c) is None
    return meeting


def test_ranks_that_wait_for_one_that_computes_are_not_stuck() -> None:
    first, second = (call("all_reduce", group, blocking=False) for group in ((0, 1), (1, 2)))
    assert waiting((0, first), (1, second)).stuck() is None


def test_ranks_that_wait_for_each_other_are_stuck() -> None:
    left, right = call("all_reduce", (0, 1), blocking=False), call("all_reduce", (0, 1, 2), blocking=False)
    found = waiting((0, left), (1, right)).stuck()
    assert found is not None
    assert (found.reason, found.ranks) == ("deadlock", (0, 1))
