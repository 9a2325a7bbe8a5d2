// Which cores this process may use, and how much of them: its affinity, and the quota of its
// control group, by which containers are given a share of a machine.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace longspan {

/// The cores that the calling thread may run on, ascending; empty where the system does not say.
std::vector<int> affinity();

/// The cores' worth of time that a process in `groups` (the text of /proc/self/cgroup) gets: the
/// least quota of its groups and those above them, of cgroup 2 or 1, below `mount`
/// (/sys/fs/cgroup). 0 where there is no quota.
double quota_of(const std::string& groups, const std::filesystem::path& mount);

/// quota_of this process.
double own_quota();

/// The threads that this process can keep busy: its affinity, and no more than its quota; at
/// least 1.
int usable_cores();

/// The threads of rank `own`, where the ranks of a node may run on `cores[rank]`. Ranks that may
/// run on a core share it evenly, so ranks pinned apart have all of their own, and ranks that are
/// not pinned an even share; no more than their share of `quota` (0: none); at least 1.
int fair_share(const std::vector<std::vector<int>>& cores, int own, double quota);

}  // namespace longspan
