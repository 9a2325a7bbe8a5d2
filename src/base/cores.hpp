// The cores that this process may use: its affinity, and the quota of its control group, which
// limits a container to a share of a machine.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace longspan {

/// The cores that the calling thread may run on, ascending; empty if the system does not tell.
std::vector<int> affinity();

/// The CPU time, in cores, of a process in `groups` (the text of /proc/self/cgroup): the least
/// quota of its groups and those above them, of cgroup 2 or 1, below `mount` (/sys/fs/cgroup). 0
/// without a quota.
double quota_of(const std::string& groups, const std::filesystem::path& mount);

/// quota_of this process.
double own_quota();

/// The threads that this process can keep busy: its affinity, limited by its quota; at least 1.
int usable_cores();

/// The number of threads of rank `own`, if the ranks of a node may run on `cores[rank]`. Ranks
/// share a core evenly if they may run on it. Ranks pinned apart thus have all of their own cores,
/// and ranks that are not pinned an even share. It is at most their share of `quota` (0: none), and
/// at least 1.
int fair_share(const std::vector<std::vector<int>>& cores, int own, double quota);

}  // namespace longspan
