"""Real hosts to test against: `Cluster` (network namespaces, needs root) and `LoopbackCluster` (anyone).

    with Cluster(4) as cluster:
        cluster.cut("server3")
        subprocess.run(["ssh", "-F", str(cluster.ssh_config), "server1", "hostname"])

Debian packages both need are in packages.txt.
"""

from .access import AccessFiles
from .cluster import CONTROLLER, Cluster
from .commands import ClusterError
from .loopback import LoopbackCluster
from .processes import Process
from .registry import destroy_clusters

__all__ = [
    "CONTROLLER",
    "AccessFiles",
    "Cluster",
    "ClusterError",
    "LoopbackCluster",
    "Process",
    "destroy_clusters",
]
