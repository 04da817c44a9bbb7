import pytest

from lightning_topt.costs.communication import (
    Group,
    mesh_groups,
    ranks_of_groups,
)


def test_where_groups_lie():
    assert Group(4).is_inside(4) and Group(2, 2).is_inside(4)
    assert not Group(8).is_inside(4) and not Group(2, 4).is_inside(4)
    assert [
        Group(8).ranks_on_node(4),
        Group(2, 4).ranks_on_node(4),
        Group(4, 2).ranks_on_node(4),
    ] == [4, 1, 2]
    assert [
        Group(2, 8).groups_on_node(4),
        Group(2, 4).groups_on_node(4),
        Group(4, 2).groups_on_node(4),
    ] == [4, 4, 2]
    for wrong in ((0, 1), (2, 0), (2.0, 1), (True, 1)):
        with pytest.raises(ValueError, match="at least 1"):
            Group(*wrong)


def test_ranks_of_all_groups_of_a_kind():
    assert ranks_of_groups(Group(2), 4) == [[0, 1], [2, 3]]
    assert ranks_of_groups(Group(2, 2), 8) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert ranks_of_groups(Group(4), 4) == [[0, 1, 2, 3]]


def test_groups_that_meshes_can_have():
    assert mesh_groups(1, devices_per_node=1) == ()
    assert mesh_groups(2, devices_per_node=2) == (Group(2),)
    for devices in (1, 2, 4):
        assert mesh_groups(4, devices_per_node=devices) == (Group(4), Group(2), Group(2, 2))
    assert set(mesh_groups(12, devices_per_node=4)) == {
        Group(12),
        *(Group(2), Group(6, 2)),
        *(Group(4), Group(3, 4)),
    }  # neither 3 nor 6 divides a node of 4 or is made of such
    many = mesh_groups(512, devices_per_node=8)
    assert {Group(8), Group(64, 8), Group(256, 2), Group(16)} < set(many)
    assert Group(2) not in many and Group(4) not in many  # 256 and 128 groups
