"""Links are read, and the fastest of ring, tree and hierarchy is chosen by arithmetic."""

import pytest
from networks import make_network

from jddp.ground.errors import ConfigError
from jddp.ground.typing import MEBIBYTE
from jddp.workbench.links import HOPPER, Fabric, Link, with_links

# No protocol of low latency, so that the figures below can be followed by hand.
NEVER = Link(1.0, 1.0, "")
TOY = {
    "nvlink": Link(100e9, 1e-6, ""),
    "nvlink_ll": NEVER,
    "nic": Link(10e9, 10e-6, ""),
    "nic_ll": NEVER,
}
START = 8.4e-6


def test_a_ring_takes_its_hops_and_the_bytes_that_each_gpu_sends():
    fabric = Fabric(1, 4, TOY)
    found = fabric.best(100_000_000)
    assert found.algorithm == "ring"
    # Twice around: six hops, and 2 * 3/4 of 100 MB at 100 GB/s.
    assert found.seconds == pytest.approx(START + 6e-6 + 1.5e-3)
    assert fabric.sent(100_000_000) == 150_000_000
    assert fabric.best(100_000_000, "all-gather").seconds == pytest.approx(START + 3e-6 + 0.75e-3)
    assert fabric.sent(100_000_000, "all-gather") == 75_000_000


def test_over_hosts_small_payloads_take_a_tree_and_large_ones_a_ring():
    fabric = Fabric(8, 2, TOY)
    tree, ring = fabric.best(1000), fabric.best(10**9)
    # Up and down: one hop in a host, and three between eight of them. Two adapters: 20 GB/s.
    assert (tree.algorithm, ring.algorithm) == ("tree", "ring")
    assert tree.seconds == pytest.approx(START + 2e-6 + 60e-6 + 2 * 1000 / 20e9)
    # Thirty hops, of which two for each host leave it.
    assert ring.seconds == pytest.approx(START + 14e-6 + 160e-6 + 2 * 15 / 16 * 1e9 / 20e9)
    assert ring.bytes_per_second == 20e9


def test_where_adapters_are_slow_each_gpu_reduces_its_part_between_hosts():
    found = Fabric(2, 8, TOY | {"nic": Link(1e9, 10e-6, "")}).best(10**9)
    assert found.algorithm == "hierarchical"
    within = 2 * START + 14e-6 + 2 * 7 / 8 * 1e9 / 100e9
    between = START + 20e-6 + 2 * 1 / 2 * 1e9 / 8 / 1e9
    assert found.seconds == pytest.approx(within + between)


@pytest.mark.parametrize("hosts, rate, hop", [(1, 100e9, 1e-6), (2, 10e9, 10e-6)])
def test_a_permute_is_one_hop_in_which_each_gpu_sends_its_bytes_to_one_other(hosts, rate, hop):
    found = Fabric(hosts, 4, TOY).best(10**8, "collective-permute")
    assert (found.algorithm, found.hops, found.sent_bytes) == ("send", 1, 10**8)
    assert found.seconds == pytest.approx(START + hop + 1e8 / rate)
    assert found.host_bytes == (hosts > 1) * 4 * 10**8


def test_groups_of_gpus_have_the_links_between_them():
    fabric = Fabric(4, 2, TOY)
    assert fabric.among(()) == fabric
    assert fabric.among((2, 3)) == Fabric(1, 2, TOY)
    assert fabric.among((0, 2, 4, 6)) == Fabric(4, 1, TOY)
    # A program of 4 hosts, run by 16: only groups that reach over all hosts have more members.
    larger = Fabric(16, 2, TOY, num_stretched=4)
    assert larger.among((0, 1)) == Fabric(1, 2, TOY)
    assert larger.among((0, 2, 4, 6)) == larger.among((1, 3, 5, 7)) == Fabric(16, 1, TOY)
    assert larger.among((0, 4)) == larger.among((2, 6)) == Fabric(8, 1, TOY)
    assert larger.among((0, 1, 2, 3)) == larger.among((4, 5, 6, 7)) == Fabric(2, 2, TOY)


@pytest.mark.parametrize("mebibytes", [0.03, 1, 4, 8, 16, 32, 64, 128, 256, 1024])
def test_eight_gpus_take_what_others_have_measured_within_thirty_percent(mebibytes):
    measured = make_network().seconds(mebibytes * MEBIBYTE)
    assert Fabric(1, 8, HOPPER).seconds(mebibytes * MEBIBYTE) == pytest.approx(measured, rel=0.3)


def test_links_are_replaced_by_name():
    found = with_links(HOPPER, ["nvlink=300GB/s,2us", "nic=400Gb/s,0.5ms"])
    assert found["nvlink"] == Link(300e9, 2e-6, "given")
    assert found["nic"] == Link(50e9, 0.5e-3, "given")
    assert found["nic_ll"] == HOPPER["nic_ll"]


NO_LINKS = {"nvlnk=300GB/s,2us": "Did you mean 'nvlink'", "nic=0GB/s,5us": "above 0"}
NO_LINKS |= dict.fromkeys(["nic", "nic=50GB/s", "nic=5.5.5GB/s,5us", "nic=50GB/s,5 minutes"], "not")


@pytest.mark.parametrize("text, message", NO_LINKS.items())
def test_what_is_no_link_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        with_links(HOPPER, [text])
