"""The doctor on hosts of a network: slow, badly named, out of reach, with disks of their own."""

import contextlib
import re

import pytest

from clusters.hosts import Hosts
from clusters.launching import OnHost

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.xdist_group("hosts")]
# Run before the doctor, on a host: a folder that is not shared.
NOT_SHARED = "mount -t tmpfs none shared"


@pytest.fixture
def hosts(tmp_path):
    with Hosts(tmp_path, "h1", "h2", "h3") as hosts:
        yield hosts


def examine(hosts, folder, *ranks, coordinator="h1:61500", before=None, **variables):
    """Runs these processes of a doctor of three, each on a host of its own."""
    (folder / "shared").mkdir(exist_ok=True)
    (folder / "cache").write_text(str(folder / "xdg"))
    job = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "3"} | variables
    asked = ["--dir", "shared", "--num-devices", "3"]
    with contextlib.ExitStack() as stack:
        started = []
        for rank in ranks:
            mine = {"module": "jddp doctor", "before": (before or {}).get(rank, "")}
            mine |= {"JAX_PROCESS_ID": str(rank)} | job
            each = OnHost(hosts, f"h{rank + 1}", folder, *asked, **mine)
            started.append(stack.enter_context(each))
        codes = [each.end() for each in started]
    reported = re.sub(r"\n {8}", " ", started[0].out)
    return codes, reported.splitlines(), [each.err for each in started]


def lines_with(words, lines):
    return [line for line in lines if words in line]


@pytest.mark.long
def test_a_host_with_less_bandwidth_is_named_and_so_is_a_disk_of_its_own(hosts, tmp_path):
    queue = "tc qdisc add dev e0 root tbf rate 100mbit burst 32k latency 50ms"
    hosts.run("h1", *queue.split())
    codes, reported, errors = examine(hosts, tmp_path, 0, 1, 2, before={2: NOT_SHARED})
    assert codes == [69, 69, 69], errors
    slow, *_ = lines_with("takes", lines_with("for 1024 KiB there and back", reported))
    assert slow.startswith("  warn  process 0 on h1 takes ")
    (blind,) = lines_with("does not see", reported)
    assert re.match(r"  bad   .*/shared: process 2 does not see, within 15 s, a file", blind)


def test_who_does_not_reach_the_others_is_shown_what_is_wrong_with_the_host(hosts, tmp_path):
    hosts.resolve("h2", "127.0.1.1 h2", "127.0.1.1 h1")
    codes, reported, (error,) = examine(hosts, tmp_path, 1, JDDP_START_SECONDS="1")
    assert codes == [69]
    assert "cannot reach process 0 at h1:61500: Connection refused" in error
    assert error.count("\n") == 1
    assert lines_with("h2 resolves only to 127.0.1.1", reported)
